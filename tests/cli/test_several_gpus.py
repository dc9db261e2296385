"""scripts/several_gpus.sh: it says what is not measurable without GPUs, and its commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from samestep.cli import app
from tests.preloaded.client import ROOT

SCRIPT = ROOT / "scripts" / "several_gpus.sh"


def test_without_several_gpus_it_says_what_is_not_measurable(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", SCRIPT, tmp_path / "found"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "this machine has 0 GPU(s). Not measurable here: NCCL between GPUs" in done.stdout
    assert "samestep bench scaling --quick" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", re.findall(r"-m samestep ([a-z]+(?: [a-z]+)?)", SCRIPT.read_text()))
def test_its_commands_exist(words: str) -> None:
    known = get_command(app)
    first, *more = words.split()
    assert first in known.commands  # type: ignore[attr-defined]
    if first == "bench":
        assert more[0] in known.commands["bench"].commands  # type: ignore[attr-defined]
