"""What a task imports is found without running it, in the files beside it too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from samestep.launch.forkserver.server import TaskImports

TASK = """
import os, torch.nn as nn
from torch.utils.data import Dataset, DataLoader
from mine import thing
from parts.model import Model
from . import nothing
raise SystemExit("it was run")
try:
    import maybe
except ImportError:
    maybe = None
def later():
    import in_a_function
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "mine.py").write_text("import json\nimport task\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "model.py").write_text("from torch import *\nimport numpy\n")
    (tmp_path / "parts" / "broken.py").write_text("def")
    return tmp_path / "task.py"


def test_imports_are_found_where_a_run_would_come_by(task: Path) -> None:
    found = TaskImports.of(task)
    assert found.names == (
        "os", "torch.nn", "torch.utils.data:Dataset", "torch.utils.data:DataLoader", "maybe", "json", "numpy",
    )  # fmt: skip
    found.load("xml.dom:minidom")
    assert "xml.dom.minidom" in sys.modules
    with pytest.raises(ModuleNotFoundError):
        found.load("maybe")


def test_a_file_with_the_name_of_an_imported_package_is_named(task: Path) -> None:
    found = TaskImports.of(task)
    assert found.hidden_by_imports() == ""
    (task.parent / "json.py").touch()
    assert "json.py has the name of a package" in found.hidden_by_imports()
