"""Writes docs/cli.md from the commands: `python scripts/cli_reference.py`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, get_args, get_origin

from typer.main import get_command

from samestep.cli import app

TARGET = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# All commands and options

Written by `python scripts/cli_reference.py`. [Commands](commands.md) has a line per command, and the exit codes.
"""


SHARED_BY = 4
"""A row that at least this many commands have is shown once, at the top."""


def reference() -> str:
    """Return the page."""
    commands = dict(_commands("samestep", get_command(app)))
    counts = Counter(row for command in commands.values() for row in _rows(command))
    shared = {row: count for row, count in counts.items() if count >= SHARED_BY}
    head = f"{HEAD}\n## Shared by several commands\n{_table(list(shared))}"
    return head + "".join(_section(name, command, shared) for name, command in commands.items())


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield every visible command that is no group, with its whole name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for inner in command.list_commands(None):
        found = command.commands[inner]
        if not found.hidden:
            yield from _commands(f"{name} {inner}", found)


def _shown(command: Any) -> list[Any]:
    return [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]


def _rows(command: Any) -> list[str]:
    return [_row(one) for one in _shown(command)]


def _section(name: str, command: Any, shared: Collection[str]) -> str:
    arguments = [one for one in _shown(command) if one.param_type_name == "argument"]
    words = "".join(f" {_argument(one)}" for one in arguments)
    rows = _rows(command)
    also = [found[1] for row in rows if row in shared and (found := re.match(r"\| (`--[^|]*`)", row))]
    more = f"\nAlso {', '.join(also)}.\n" if also else ""
    table = _table([row for row in rows if row not in shared])
    return f"\n## `{name}`\n\n```\n{name}{words} [OPTIONS]\n```\n\n{_text(command.help or '')}\n{table}{more}"


def _table(rows: Sequence[str]) -> str:
    return "\n| | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""


def _argument(parameter: Any) -> str:
    word = _word(parameter) + ("..." if parameter.nargs == -1 else "")
    return word if parameter.required else f"[{word}]"


def _word(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _row(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    words = [*parameter.opts, *parameter.secondary_opts] if option else [_word(parameter)]
    names = ", ".join(f"`{word}`" for word in words)
    values = _choices(parameter)
    one_of = f" One of {', '.join(f'`{value}`' for value in values)}." if values else ""
    default = parameter.default
    is_set = default is not None and default is not False and default != "" and not callable(default)
    shown = f" Default: `{default}`." if is_set and option else ""
    return f"| {_cell(names)} | {_cell(parameter.help or '')}{one_of}{shown} |"


def _choices(parameter: Any) -> list[str]:
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    return list(get_args(kind)) if get_origin(kind) is Literal else []


def _text(help_text: str) -> str:
    paragraphs = [" ".join(part.split()) for part in help_text.split("\n\n")]
    shown = [re.sub(r"^Example: (.*)$", r"Example: `\1`", part) for part in paragraphs if part]
    return "\n\n".join(
        part if part.startswith("Example: `") else fill(part, 118, break_on_hyphens=False) for part in shown
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
