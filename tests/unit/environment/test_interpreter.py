"""How a process of ours starts another one."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from samestep.environment.interpreter import interpreter_words

_Version = namedtuple("_Version", "major minor")


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_a_file_of_the_working_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    """The form for Python 3.10, which has no -P, runs on later ones too."""
    monkeypatch.setattr(sys, "version_info", _Version(*version))
    words = interpreter_words("timeit")
    monkeypatch.undo()
    (tmp_path / "gc.py").write_text("raise SystemExit('the folder was read')")
    (tmp_path / "itertools.py").write_text("raise SystemExit('the folder was read')")
    (tmp_path / "timeit.py").write_text("raise SystemExit('the folder was read')")
    command = [sys.executable, *words, "-n", "1", "-r", "1", "pass"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "1 loop, best of 1" in done.stdout
