"""What CI leaves out has a reason, which names what it runs instead; and no requirement is left out with it."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.variations import variations

ROOT = Path(__file__).parents[1]
MARK = "pytest.mark.variation"
REQUIREMENTS = runpy.run_path(str(ROOT / "scripts" / "requirements_table.py"))


def marks_of(test: ast.FunctionDef) -> list[ast.expr]:
    return [one for one in test.decorator_list if ast.unparse(one).startswith(MARK)]


TREES = {
    path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / "tests").rglob("test_*.py"))
}
TESTS = [
    (path, node)
    for path, tree in TREES.items()
    for node in tree.body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]
IN_CI = {(path, node.name) for path, node in TESTS if not marks_of(node) and path.parts[1] != "gpu"}
MARKED = {f"{path}::{node.name}": node for path, node in TESTS if marks_of(node)}


@pytest.mark.parametrize("name", MARKED)
def test_a_mark_names_a_test_that_ci_runs(name: str) -> None:
    [mark] = marks_of(MARKED[name])
    assert isinstance(mark, ast.Call), "without a reason"
    [reason] = [ast.literal_eval(argument) for argument in mark.args]
    named = re.findall(r"\btest_\w+", reason)
    assert named
    path = Path(name.partition("::")[0])
    for test in named:  # one of the same file is meant first
        places = {place for place, found in IN_CI if found == test}
        here = any(place == path and node.name == test for place, node in TESTS)
        assert path in places if here else places, test


def test_cases_are_marked_by_the_function_that_keeps_some() -> None:
    """`pytest.param(..., marks=...)` could leave out all of them."""
    used = {
        str(path): sum(isinstance(node, ast.Attribute) and ast.unparse(node) == MARK for node in ast.walk(tree))
        for path, tree in TREES.items()
    }
    decorated = [name.partition("::")[0] for name in MARKED]
    assert {path: count for path, count in used.items() if count} == {path: decorated.count(path) for path in decorated}


def test_every_requirement_with_tests_has_one_in_ci() -> None:
    tagged = REQUIREMENTS["tagged_tests"]()
    assert not [tag for tag, tests in tagged.items() if all(test in MARKED for test in tests)]


def test_cases_that_are_kept_are_without_the_mark() -> None:
    made = variations(["a", "b", ("c", 1)], kept=["a", "c"])
    assert [(one.values, [mark.name for mark in one.marks]) for one in made] == [
        (("a",), []),
        (("b",), ["variation"]),
        (("c", 1), []),
    ]
    assert made[1].marks[0].args == ("CI runs the cases a, c",)


@pytest.mark.parametrize("kept", [[], ["a", "z"]])
def test_something_that_is_there_must_be_kept(kept: list[str]) -> None:
    with pytest.raises(ValueError, match="give at least one, and each out of"):
        variations(["a", "b"], kept=kept)
