"""Which requirement is met where: by tests that carry its tag, as `@pytest.mark.requirement("002-M3-1")`, or by what
tests/requirement_places.tsv names: a page, a benchmark, a decision, or why it is not met.

Prints the requirements without a place and those that are not met; `--write` writes the table into tests/REQUIREMENTS.md. Tests are read, not imported.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "requirements.tsv"
PLACES = ROOT / "tests" / "requirement_places.tsv"
PAGE = ROOT / "tests" / "REQUIREMENTS.md"
KINDS = {
    "C": "code", "K": "config or option", "S": "script", "D": "document", "T": "test", "B": "benchmark or target",
    "R": "risk and its mitigation", "I": "information", "D/C": "document or code", "-": "",
}  # fmt: skip
MET, PARTLY, NOT_MET = "met", "partly", "not met"
STATES = {
    MET: "a file shows it", "measured": "figures are there", "decided": "otherwise, or as it is, with the reason",
    "superseded": "lanes do what was meant", "scope": "information that asks for nothing", PARTLY: "what is missing", NOT_MET: "why",
}  # fmt: skip
"""What a place can say, and what its words then are about."""
_NEED_A_FILE = (MET, "measured")


@dataclass(frozen=True)
class Requirement:
    tag: str
    kind: str
    text: str


@dataclass(frozen=True)
class Place:
    """Where a requirement is met, besides tests."""

    tag: str
    state: str
    file: str
    """With an anchor, if it is a part of a page; empty if the words are all."""
    words: str

    def mistakes(self) -> list[str]:
        """Return what is wrong with it."""
        found = []
        name, _, anchor = self.file.partition("#")
        path = ROOT / name
        if self.state not in STATES:
            found.append(f"{self.state!r} is none of {', '.join(STATES)}")
        if name and not path.exists():
            found.append(f"there is no {name}")
        elif anchor and anchor not in _anchors(path):
            found.append(f"{name} has no heading #{anchor}")
        if not name and self.state in _NEED_A_FILE:
            found.append(f"{self.state} needs a file")
        if not self.words and self.state not in _NEED_A_FILE:
            found.append(f"{self.state} needs a reason")
        return [f"{self.tag}: {mistake}" for mistake in found]

    def shown(self) -> str:
        """It as Markdown, on the page."""
        link = f"[{self.file}]({_from_page(self.file)})" if self.file else ""
        words = " ".join(part for part in (link, self.words) if part)
        return words if self.state in (MET, "measured") else f"*{self.state}*: {words}"


def requirements() -> list[Requirement]:
    """Return all of them, in the order of the plans."""
    lines = LIST.read_text(encoding="utf-8").splitlines()[1:]
    return [Requirement(*line.split("\t", 2)) for line in lines]


def places() -> dict[str, list[Place]]:
    """Return where requirements are met besides tests, by their tags."""
    found: dict[str, list[Place]] = {}
    for line in PLACES.read_text(encoding="utf-8").splitlines()[1:]:
        place = Place(*line.split("\t"))
        found.setdefault(place.tag, []).append(place)
    return found


@cache
def tagged_tests() -> dict[str, list[str]]:
    """Return the tests of each tag, as `tests/file.py::test_name`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, tag in _tags(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(tag, []).append(f"{path.relative_to(ROOT)}{name}")
    return found


def _tags(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield from ((f"::{node.name}", tag) for mark in node.decorator_list for tag in _of(mark))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            yield from (("", tag) for mark in marks for tag in _of(mark))


def _of(mark: ast.expr) -> list[str]:
    """Return the tags of a mark; none if it is another one."""
    if not (isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.requirement"):
        return []
    return [argument.value for argument in mark.args if isinstance(argument, ast.Constant)]


def _anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings have where Markdown is rendered."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def _from_page(file: str) -> str:
    return os.path.relpath(ROOT / file, PAGE.parent)


def table() -> str:
    """One row for each requirement."""
    tests, elsewhere = tagged_tests(), places()
    rows = ["| requirement | kind | | where |", "|---|---|---|---|"]
    for one in requirements():
        text = one.text.replace("|", "\\|")
        where = [f"`{test}`" for test in tests.get(one.tag, ())]
        where += [place.shown() for place in elsewhere.get(one.tag, ())]
        rows.append(f"| {one.tag} | {KINDS[one.kind]} | {text} | {'<br>'.join(where)} |")
    return "\n".join(rows)


def summary() -> str:
    """Return how many have a place, and of which kind."""
    tests, elsewhere, everything = tagged_tests(), places(), requirements()
    placed = sum(one.tag in tests or one.tag in elsewhere for one in everything)
    by_state = {
        state: sum(any(p.state == state for p in elsewhere.get(one.tag, ())) for one in everything)
        for state in (PARTLY, NOT_MET)
    }
    return (
        f"{sum(one.tag in tests for one in everything)} of {len(everything)} requirements have a test with their tag; {placed} have a place. "
        f"{by_state[PARTLY]} are met partly and {by_state[NOT_MET]} are not met, with what is missing."
    )


def with_table(text: str) -> str:
    """Return a page with the table, and how many have a place, between its marks."""
    begin, end = "<!-- requirements: begin -->", "<!-- requirements: end -->"
    made = f"{begin}\n\n{summary()}\n\n{table()}\n\n{end}"
    return re.sub(f"{begin}.*?{end}", lambda _: made, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into tests/REQUIREMENTS.md")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    tests, elsewhere = tagged_tests(), places()
    for one in requirements():
        missing = [p for p in elsewhere.get(one.tag, ()) if p.state in (PARTLY, NOT_MET)]
        for place in missing:
            print(f"{one.tag}  {place.state}: {place.words}")
        if one.tag not in tests and one.tag not in elsewhere:
            print(f"{one.tag}  no place: {KINDS[one.kind]:24} {one.text}")
    print(summary())


if __name__ == "__main__":
    main()
