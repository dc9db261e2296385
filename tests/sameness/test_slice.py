"""A slice of the sameness matrix that is small enough for every test run; `make sameness` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preloaded.client import ROOT
from tests.sameness.cases import CASES
from tests.sameness.cells import FOUND, IDENTICAL, REFUSED, Cell, Plan, run_row
from tests.sameness.table import page
from tests.sameness.ways import WAYS

BY_NAME = {case.name: case for case in CASES}


def run(name: str, ways: str, folder: Path, worlds: tuple[int, ...] = (1, 2, 4)) -> list[Cell]:
    case = BY_NAME[name]
    chosen = [way for way in WAYS if way.name in ways.split()]
    return run_row(Plan(chosen, worlds, "cpu", folder), case)


@pytest.mark.parametrize(
    ("name", "ways"),
    [("clip_norm", "eager sharded resharded"), ("tied_lm", "eager resumed"), ("streams", "eager resumed")],
)
def test_a_row_is_one_run(name: str, ways: str, tmp_path: Path) -> None:
    cells = run(name, ways, tmp_path)
    assert len(cells) == 3 * len(ways.split()) - 2 * sum(w[:2] == "re" for w in ways.split())
    assert [cell for cell in cells if cell.verdict != IDENTICAL] == []


def test_a_refusal_has_its_reason(tmp_path: Path) -> None:
    cells = run("few_lanes", "eager", tmp_path, worlds=(1, 5))
    assert [cell.verdict for cell in cells] == [IDENTICAL, REFUSED]
    assert "5 ranks but only 4 lanes" in cells[1].reason


def test_a_planted_mistake_is_found(tmp_path: Path) -> None:
    """Else the matrix would call everything identical."""
    cells = run("generator", "eager resumed", tmp_path, worlds=(1, 3))
    assert [cell.verdict for cell in cells] == [IDENTICAL, FOUND, FOUND]


def test_the_page_has_every_row() -> None:
    written = (ROOT / "docs" / "sameness.md").read_text(encoding="utf-8")
    lost = [case.name for case in CASES if f"| {case.title} |" not in written]
    assert not lost, "run: make sameness"


def test_the_page_shows_what_is_wrong_and_where() -> None:
    cases = [BY_NAME["vit"], BY_NAME["sparse"]]
    cells = [
        Cell("vit", "eager", "1", IDENTICAL),
        Cell("vit", "eager", "3", "DIFFERENT", "loss from step 2 on, 5 ULP"),
        Cell("sparse", "eager", "1", REFUSED, "no\n| sparse gradients"),
    ]
    text = page(cases, WAYS[:2], cells, "make sameness", "cpu", 61.0)
    assert "**1 identical, 1 refused, 1 DIFFERENT.**" in text
    assert f"| {cases[0].title} | yes: 1; **DIFFERENT** [1]: 3 | - |" in text
    assert "| 1 | loss from step 2 on, 5 ULP |\n| 2 | no \\| sparse gradients |\n" in text
