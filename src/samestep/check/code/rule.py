"""Rules and their findings."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from samestep.check.code.source import Code

Effect = Literal["breaks", "differs", "slows"]
"""What it does on several ranks: ends the run, changes what is computed or written, or makes it wait."""


Find = Callable[["Code"], Iterator[ast.AST]]


def calls_of(*names: str) -> Find:
    """Return what finds the calls of full names."""
    return lambda code: code.called(*names)


@dataclass(frozen=True)
class Rule:
    """One kind of line that does something else on several ranks."""

    name: str
    effect: Effect
    title: str
    """What was found, in a few words."""
    why: str
    instead: str
    """What to write with samestep."""
    find: Find
    """Where it is."""
    plain: bool = False
    """Not looked for in files that hand their loop to a library, which takes care of it."""
    files: Literal["all", "uses_torch", "is_ported", "trains"] = "all"
    """Kind of files that it applies to."""

    def applies_to(self, code: Code) -> bool:
        """Return whether it is looked for in a file."""
        return not (self.plain and code.is_driven) and (self.files == "all" or bool(getattr(code, self.files)))


@dataclass(frozen=True)
class Finding:
    """One place of one rule."""

    rule: str
    effect: Effect
    file: str
    line: int
    """In the cell, if there is one."""
    column: int
    cell: int | None
    """Cell of a notebook, from 1."""
    code: str
    """The line as it is written."""
    title: str
    why: str
    instead: str

    @classmethod
    def of(cls, rule: Rule, *, file: str, line: int, column: int, cell: int | None, code: str) -> Finding:
        """Return a place where a rule applies."""
        return cls(rule.name, rule.effect, file, line, column, cell, code, rule.title, rule.why, rule.instead)

    @property
    def place(self) -> str:
        """Return where it is, as editors open it."""
        return f"{self.file}:{'' if self.cell is None else f'cell {self.cell}:'}{self.line}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
