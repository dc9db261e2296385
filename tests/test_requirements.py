"""Tags of requirements: each is one of the list, and the document's table is that of the tags."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "requirements_table.py"))


def test_every_tag_is_a_requirements() -> None:
    known = [one.tag for one in SCRIPT["requirements"]()]
    assert len(known) == len(set(known)) == 362
    tagged = SCRIPT["tagged_tests"]()
    assert set(tagged) <= set(known)
    assert len(tagged) > 100


def test_a_tag_is_found_at_the_test_that_carries_it() -> None:
    found = SCRIPT["tagged_tests"]()["000-P0-1"]
    assert found == ["tests/cli/test_scan.py::test_scan_exits_by_what_it_finds"]


def test_the_table_of_the_document_is_that_of_the_tags() -> None:
    written = SCRIPT["PAGE"].read_text(encoding="utf-8")
    made = SCRIPT["with_table"](written)
    assert made == written, "run: python scripts/requirements_table.py --write"
