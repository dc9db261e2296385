"""Which requirement is met where: by the tests that carry its tag, as `@pytest.mark.requirement("002-M3-1")`.

Prints the requirements without a test; `--write` puts the table into docs/decisions.md. Tests are read, not imported.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "requirements.tsv"
PAGE = ROOT / "docs" / "decisions.md"
KINDS = {
    "C": "code", "K": "config or option", "S": "script", "D": "document", "T": "test", "B": "benchmark or target",
    "R": "risk and its mitigation", "I": "information", "D/C": "document or code", "-": "",
}  # fmt: skip


@dataclass(frozen=True)
class Requirement:
    tag: str
    kind: str
    text: str


def requirements() -> list[Requirement]:
    """All of them, in the order of the plans."""
    lines = LIST.read_text(encoding="utf-8").splitlines()[1:]
    return [Requirement(*line.split("\t", 2)) for line in lines]


def tagged_tests() -> dict[str, list[str]]:
    """The tests of each tag, as `tests/file.py::test_name`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, tag in _tags(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(tag, []).append(f"{path.relative_to(ROOT)}{name}")
    return found


def _tags(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield from (
                (f"::{node.name}", tag) for mark in node.decorator_list for tag in _of(mark)
            )
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            marks = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            yield from (("", tag) for mark in marks for tag in _of(mark))


def _of(mark: ast.expr) -> list[str]:
    """The tags of a mark; none if it is another one."""
    if not (isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.requirement"):
        return []
    return [argument.value for argument in mark.args if isinstance(argument, ast.Constant)]


def table() -> str:
    """One row for each requirement."""
    tests = tagged_tests()
    rows = ["| requirement | kind | | tests |", "|---|---|---|---|"]
    for one in requirements():
        text = one.text.replace("|", "\\|")
        where = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in tests.get(one.tag, ()))
        rows.append(f"| {one.tag} | {KINDS[one.kind]} | {text} | {where} |")
    return "\n".join(rows)


def with_table(text: str) -> str:
    """A page with the table, and how many have a test, between its marks."""
    everything, tests = requirements(), tagged_tests()
    have = sum(one.tag in tests for one in everything)
    begin, end = "<!-- requirements: begin -->", "<!-- requirements: end -->"
    made = f"{begin}\n\n{have} of {len(everything)} requirements have a test with their tag.\n\n{table()}\n\n{end}"
    return re.sub(f"{begin}.*?{end}", lambda _: made, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/decisions.md")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    tests, everything = tagged_tests(), requirements()
    missing = [one for one in everything if one.tag not in tests]
    for one in missing:
        print(f"{one.tag}  {KINDS[one.kind]:24} {one.text}")
    print(
        f"{len(everything) - len(missing)} of {len(everything)} requirements have a test with their tag"
    )


if __name__ == "__main__":
    main()
