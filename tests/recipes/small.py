"""The recipe on little data: shapes of 16 pixels, a narrow encoder, few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.processes import ROOT, run

RECIPE = ROOT / "recipes" / "metric_learning"
FIRST, SECOND = RECIPE / "first.yaml", RECIPE / "second.yaml"
COMMON = (
    "params.size=16", "params.width=4", "global_batch=40", "epochs=3", "distributed.device=cpu",
    "distributed.threads_per_rank=1",
)  # fmt: skip


def script(name: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one of the recipe's own programs."""
    return run([sys.executable, str(RECIPE / name), *map(str, words)], cwd=cwd)


def make_data(folder: Path) -> None:
    """Five classes of 20 shapes in `images`, split in `data`."""
    made = script("images.py", "shapes", "images", "--per-class", "20", cwd=folder)
    assert made.returncode == 0, made.stderr
    done = script("split.py", "images", "data", "--mode", "fixed", "--val-share", "0.2", cwd=folder)
    assert done.returncode == 0, done.stderr
