"""The recipe with few steps of few samples."""

from __future__ import annotations

from tests.cli.processes import ROOT

RECIPE = ROOT / "recipes" / "decomposition"
CONFIG = RECIPE / "config"
COMMON = ("steps=2", "evaluation.every_steps=2", "global_batch=16", "params.valid_samples=8", "evaluation.batch=4",
          "distributed.device=cpu")  # fmt: skip
