"""Folders that recipes are told to replace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, run
from tests.variations import variations

RECIPES = sorted(ROOT.glob("recipes/*/run.py"))


@pytest.mark.parametrize("script", variations(RECIPES, kept=RECIPES[:1]), ids=lambda path: path.parent.name)
def test_a_recipe_never_removes_what_it_has_not_made(script: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = run([sys.executable, str(script), str(tmp_path), "--force"], cwd=tmp_path)
    assert done.returncode == 2
    assert "holds files (mine.txt) and is not what a recipe has made" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
