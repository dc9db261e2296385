"""The recipe's notebooks: executed with a tiny setting, without outputs, and of one content."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.preloaded.client import POSSIBLE, environment, server
from tests.recipes.token_classification.small import COMMON, RECIPE

LOCAL, COLAB = (RECIPE / "notebooks" / f"01_orchestrate_training_{kind}.ipynb" for kind in ("local", "colab"))
OWN = {"title", "about-install", "install", "parameters", "setup"}
"""Cells in which the two differ."""


def cells(path: Path) -> dict[str, Any]:
    return {cell.id: cell for cell in nbformat.read(path, as_version=4).cells}


def executed(path: Path, only: set[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the cells print: with little data, few steps, and commands that are forked."""
    notebook = nbformat.read(path, as_version=4)
    tiny = [
        "import sys",
        "from pathlib import Path",
        f"sys.executable = {str(server().python if POSSIBLE else sys.executable)!r}",
        f"SAMESTEP = Path({str(RECIPE.parents[1])!r})",
    ]
    changes = {
        "RECIPE": f"Path({str(RECIPE)!r})",
        "FOLDER": f"Path({str(folder)!r})",
        "OVERRIDES": repr([*COMMON, "distributed.world_size=1"]),
        "SEARCH_OVERRIDES": repr(["folds=null", "trials=1", *map(_choice, COMMON)]),
        "DOCUMENTS": repr(["--train", "32", "--valid", "8"]),
    }
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            for name, value in changes.items():
                cell.source, times = re.subn(f"(?m)^{name} = .*$", f"{name} = {value}", cell.source)
                assert times == 1, name
            cell.source = "\n".join([*tiny, cell.source])
    notebook.cells = [cell for cell in notebook.cells if cell.id in only]
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute(cwd=str(folder.parent))
    monkeypatch.undo()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def _choice(word: str) -> str:
    key, _, value = word.partition("=")
    return f"space.{key}={{choice: [{value}]}}"


@pytest.mark.variation(
    "test_the_colab_notebook_is_the_local_one_but_for_its_install, and of what the cells do test_the_recipe_from_documents_to_results"
)
@pytest.mark.requirement("001-S3-1", "001-S3-2")
def test_the_local_notebook_trains_searches_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "entities"
    printed = executed(LOCAL, set(cells(LOCAL)), folder, monkeypatch)
    assert "GPUs:" in printed
    assert "Plan: 32 samples" in printed
    assert "get the same label from both" in printed
    assert {path.name for path in (folder / "runs").iterdir()} == {"measured", "final"}
    assert (folder / "model" / "tokenizer.json").exists()


@pytest.mark.requirement("001-S3-1", "001-S5-3", "001-T-5", "001-G-4")
def test_the_colab_notebook_is_the_local_one_but_for_its_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that executing its own cells is enough: what both have is executed above."""
    mine, other = cells(COLAB), cells(LOCAL)
    assert list(mine)[-len(other) + 2 :] == list(other)[2:]
    for name in other.keys() - OWN:
        assert mine[name].source == other[name].source, name
    # `install` needs a network: what it imports is there already.
    own = (OWN | {"environment", "config"}) - {"install"}
    monkeypatch.setenv("COLAB_GPU", "0")
    printed = executed(COLAB, own, tmp_path / "entities", monkeypatch)
    assert '"global_batch": 16' in printed


@pytest.mark.requirement("001-D-3", "001-S3-2", "001-S5-3")
@pytest.mark.parametrize("path", [LOCAL, COLAB], ids=lambda path: path.stem)
def test_no_output_is_committed_and_no_device_is_chosen(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
            assert not re.search(r"nproc|\.cuda\(|world_size|backend|rank", cell.source)
