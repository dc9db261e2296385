"""The guide's English: short sentences and lines, and the words of the field (`tests/language.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.language import complaints

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short_sentences_in_plain_words(page: Path) -> None:
    assert not complaints(page)


def test_complaints_name_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    long = "\n".join(["It is"] + ["said"] * 29 + ["so."])
    page.write_text(f"# of its own\n\nA generator of its own, one a rank.\n\n{long}\n\n{'x' * 121}\n\n`of its own`\n")
    found = [line.partition(":")[0] for line in complaints(page)]
    assert found == ["line of 121 characters", "sentence of 32 words", "'of its own'", "'of its own'", "'one a rank'"]
