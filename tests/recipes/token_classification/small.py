"""The recipe on little data: few documents, one narrow layer, few steps."""

from __future__ import annotations

from functools import partial

from tests.cli.processes import ROOT
from tests.recipes.importing import program

RECIPE = ROOT / "recipes" / "token_classification"
TRAIN = RECIPE / "config" / "train.yaml"
COMMON = (
    "params.dim=16", "params.layers=1", "params.heads=2", "global_batch=16", "epochs=2", "distributed.device=cpu",
    "distributed.threads_per_rank=1",
)  # fmt: skip


script = partial(program, RECIPE)
