"""The recipe with few steps of few samples."""

from __future__ import annotations

from tests.cli.processes import ROOT

RECIPE = ROOT / "recipes" / "decomposition"
CONFIG = RECIPE / "config"
COMMON = ("steps=4", "evaluation.every_steps=2", "global_batch=16", "params.valid_samples=24", "evaluation.batch=6",
          "distributed.device=cpu")  # fmt: skip
