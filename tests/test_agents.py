"""AGENTS.md: every command in it exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from samestep.cli import app

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`([^`]+)`", TEXT[TEXT.index("## Commands") : TEXT.index("## What must")])


def test_it_has_commands() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("make ")])
def test_its_targets_are_those_of_the_makefile(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"(?m)^[\w -]*\b{re.escape(line.split()[1])}\b[\w -]*:", makefile)


@pytest.mark.requirement("004-7.2-1", "004-7.2-2")
@pytest.mark.parametrize("line", [c for c in COMMANDS if "samestep " in c])
def test_its_options_are_those_of_the_command(line: str) -> None:
    words = shlex.split(line)
    words = words[words.index("samestep") + 1 :]
    known: Any = get_command(app)
    while words and words[0] in getattr(known, "commands", {}):
        known = known.commands[words.pop(0)]
    assert not hasattr(known, "commands"), f"{line}: no such command"
    options = {name for parameter in known.params for name in getattr(parameter, "opts", ())}
    assert {word for word in words if word.startswith("--")} <= options, line


def _paths() -> Iterator[str]:
    yield from re.findall(r"`((?:tests|scripts|recipes|benchmarks)/[\w./-]+)`", TEXT)
    for line in COMMANDS:
        yield from (w for w in line.split() if re.match(r"(tests|scripts|recipes)/", w))


@pytest.mark.parametrize("path", sorted(set(_paths())))
def test_what_it_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()
