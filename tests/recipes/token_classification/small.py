"""The recipe on little data: few documents, one narrow layer, few steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.processes import ROOT, run

RECIPE = ROOT / "recipes" / "token_classification"
TRAIN = RECIPE / "config" / "train.yaml"
COMMON = (
    "params.dim=16", "params.layers=1", "params.heads=2", "global_batch=16", "epochs=2", "distributed.device=cpu",
    "distributed.threads_per_rank=1",
)  # fmt: skip


def script(name: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one of the recipe's own programs."""
    return run([sys.executable, str(RECIPE / name), *map(str, words)], cwd=cwd)
