"""Tags of requirements: each is one of the list, and the document's table is that of the tags."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "requirements_table.py"))


def test_every_tag_is_a_requirements() -> None:
    known = [one.tag for one in SCRIPT["requirements"]()]
    assert len(known) == len(set(known)) == 362
    tagged = SCRIPT["tagged_tests"]()
    assert set(tagged) <= set(known)
    assert len(tagged) > 100


def test_every_place_exists_and_is_of_a_requirement() -> None:
    places = SCRIPT["places"]()
    assert set(places) <= {one.tag for one in SCRIPT["requirements"]()}
    assert not [wrong for found in places.values() for place in found for wrong in place.mistakes()]
    rows = [place for found in places.values() for place in found]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (("met", "docs/none.md", ""), "there is no docs/none.md"),
        (("met", "docs/lanes.md#the-bush", ""), "docs/lanes.md has no heading #the-bush"),
        (("met", "", "somewhere"), "met needs a file"),
        (("not met", "docs/lanes.md", ""), "not met needs a reason"),
        (("nearly", "docs/lanes.md#the-tree", "x"), "'nearly' is none of met, measured"),
    ],
)
def test_a_place_that_is_none_is_found(place: tuple[str, str, str], wrong: str) -> None:
    [found] = SCRIPT["Place"]("000-G-1", *place).mistakes()
    assert found.startswith(f"000-G-1: {wrong}")


def test_no_requirement_is_without_a_place() -> None:
    placed = {*SCRIPT["tagged_tests"](), *SCRIPT["places"]()}
    assert {one.tag for one in SCRIPT["requirements"]()} <= placed


def test_a_tag_is_found_at_the_test_that_carries_it() -> None:
    found = SCRIPT["tagged_tests"]()["000-P0-1"]
    assert found == ["tests/cli/test_check.py::test_scan_exits_by_what_it_finds"]


def test_the_table_of_the_document_is_that_of_the_tags() -> None:
    written = SCRIPT["PAGE"].read_text(encoding="utf-8")
    made = SCRIPT["with_table"](written)
    assert made == written, "run: python scripts/requirements_table.py --write"
