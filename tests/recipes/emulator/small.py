"""The recipe on little data: few times, a coarse grid, a narrow network."""

from __future__ import annotations

from functools import partial

from tests.cli.processes import ROOT
from tests.recipes.importing import program

RECIPE = ROOT / "recipes" / "emulator"
CONFIG = RECIPE / "config.yaml"
COMMON = (
    "params.hidden=8", "params.layers=2", "params.jacobian_samples=20", "global_batch=160", "evaluation.batch=50",
    "epochs=3", "distributed.device=cpu", "distributed.threads_per_rank=1",
)  # fmt: skip
SIZES = ("--times", "10", "--size", "12", "16")


script = partial(program, RECIPE)
