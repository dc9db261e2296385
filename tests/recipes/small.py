"""The recipe on little data: shapes of 16 pixels, a narrow encoder, few steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.cli.processes import ROOT
from tests.recipes.importing import program

RECIPE = ROOT / "recipes" / "metric_learning"
FIRST, SECOND = RECIPE / "first.yaml", RECIPE / "second.yaml"
COMMON = (
    "params.size=16", "params.width=4", "global_batch=40", "epochs=3", "distributed.device=cpu",
    "distributed.threads_per_rank=1",
)  # fmt: skip


script = partial(program, RECIPE)


def make_data(folder: Path) -> None:
    """Five classes of 20 shapes in `images`, split in `data`."""
    made = script("images.py", "shapes", "images", "--per-class", "20", cwd=folder)
    assert made.returncode == 0, made.stderr
    done = script("split.py", "images", "data", "--mode", "fixed", "--val-share", "0.2", cwd=folder)
    assert done.returncode == 0, done.stderr
