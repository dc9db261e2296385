"""The guide's notebooks, run from the first cell to the last by a real kernel."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.preloaded.client import ROOT, shell_path
from tests.variations import variations

TEXTS = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))["texts"]()
NAMES = sorted(path.stem for path in TEXTS)


def test_the_notebooks_are_those_of_the_script() -> None:
    for path, text in TEXTS.items():
        assert path.read_text(encoding="utf-8") == text, "run: python scripts/notebooks.py"


@pytest.mark.parametrize("name", variations(NAMES, kept=["own_loop"]))
def test_a_notebook_runs_as_it_is(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", shell_path())
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    book = nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in book.cells for output in cell.get("outputs", ())]
    said = "".join(output.get("text", "") for output in shown)
    assert "command not found" not in said, said
    if name != "own_loop":
        assert "Promise kept" in said, said
