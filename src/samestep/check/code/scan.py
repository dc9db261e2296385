"""Reads files, notebooks without what only IPython understands too, and applies rules."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.check.code.rule import Finding, Rule
from samestep.check.code.source import Code
from samestep.errors import OutputError, TextError
from samestep.parsing.json_text import read_json
from samestep.parsing.limits import short
from samestep.parsing.python_text import parse_python_text, read_python

SUFFIXES = (".py", ".ipynb")
_NOT_OURS = frozenset({"node_modules", "site-packages", "__pycache__", "venv"})


def code_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Python files and notebooks below some paths, each once, in the order of their names.

    Left out are folders with a dot, virtual environments, and links to folders, which may lead in circles.

    Raises:
        OutputError: A path is not there, or no such file.
    """
    seen: set[Path] = set()
    for path in paths:
        for file in _below(path):
            real = file.resolve()
            if real not in seen:
                seen.add(real)
                yield file


def _below(path: Path) -> Iterator[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise OutputError(f"{path} is no Python file or notebook ({', '.join(SUFFIXES)})")
        yield path
        return
    if not path.is_dir():
        raise OutputError(f"{path} is not there: give a folder, a Python file or a notebook")
    for folder, folders, names in os.walk(path):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not _is_left_out(here / name))
        yield from (here / n for n in sorted(names) if n.endswith(SUFFIXES) and _is_plain(here / n))


def _is_left_out(folder: Path) -> bool:
    name = folder.name
    return name.startswith(".") or name in _NOT_OURS or (folder / "pyvenv.cfg").exists()


def _is_plain(file: Path) -> bool:
    """Return whether it is a file, and no pipe or device, of which a read may never end."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except OSError:  # a link that leads nowhere, or in a circle
        return False


LARGEST_CODE = 2_000_000
"""Bytes of a Python file: beyond, it was made by a program."""
_SILENCED = re.compile(r"#\s*samestep:\s*ok\b(?:\s*\[([^\]]*)\])?")
_SHOWN = 160


@dataclass
class Scan:
    """The findings, and the files that could not be read."""

    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    """That were read."""
    silenced: int = 0
    """Findings in lines with `# samestep: ok`."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Files, or cells, that could not be read, and why."""

    @property
    def by_rule(self) -> dict[str, int]:
        return dict(Counter(finding.rule for finding in self.findings).most_common())

    def as_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "rules": self.by_rule,
            "files": self.files,
            "silenced": self.silenced,
            "skipped": self.skipped,
        }


@dataclass(frozen=True)
class _File:
    path: Path
    text: str
    places: Sequence[tuple[int | None, int]]
    """The cell, and the line in it, of each line."""
    tree: ast.Module


def scan(paths: Sequence[Path], rules: Sequence[Rule]) -> Scan:
    """Look for what breaks or differs on several ranks; nothing is imported or run.

    Raises:
        OutputError: A path is not there, or holds no Python.
    """
    found = Scan()
    files = list(_read(paths, found))
    if not files and not found.skipped:
        raise OutputError(f"{', '.join(map(str, paths))} holds no Python file or notebook")
    if not files and len(paths) == 1 and paths[0].is_file():
        raise OutputError(f"{paths[0]} {found.skipped[str(paths[0])]}")
    epochs = {file.path.parent for file in files if "set_epoch(" in file.text}
    for file in files:
        around = {file.path.parent, *file.path.parent.parents}
        nearby = any(folder in around or file.path.parent in folder.parents for folder in epochs)
        lines = file.text.splitlines()
        code = Code(file.tree, lines, sets_epochs=nearby)
        for rule in rules:
            if rule.applies_to(code):
                _apply(rule, code, file, found)
    found.files = len(files)
    found.findings.sort(key=lambda one: (one.file, one.cell or 0, one.line, one.column, one.rule))
    return found


def _apply(rule: Rule, code: Code, file: _File, found: Scan) -> None:
    seen: set[tuple[int, int]] = set()
    for node in rule.find(code):
        line, column = _place(node)
        if (line, column) in seen:
            continue
        seen.add((line, column))
        last = getattr(node, "end_lineno", None) or line
        first = getattr(node, "lineno", line)
        if any(_is_silenced(text, rule.name) for text in code.lines[first - 1 : last]):
            found.silenced += 1
            continue
        cell, place = file.places[line - 1]
        shown = short(code.lines[line - 1].strip(), _SHOWN)
        found.findings.append(
            Finding.of(rule, file=str(file.path), line=place, column=column + 1, cell=cell, code=shown)
        )


def _place(node: ast.AST) -> tuple[int, int]:
    """Return where to look: of a chain of calls over several lines, at the last of them."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        end, column = node.func.end_lineno, node.func.end_col_offset
        if end is not None and column is not None and end > node.lineno:
            return end, column - len(node.func.attr)
    return getattr(node, "lineno", 1), getattr(node, "col_offset", 0)


def _is_silenced(line: str, rule: str) -> bool:
    mark = _SILENCED.search(line)
    if mark is None:
        return False
    return mark[1] is None or rule in (name.strip() for name in mark[1].split(","))


def _read(paths: Sequence[Path], found: Scan) -> Iterator[_File]:
    for path in code_files(paths):
        try:
            if path.suffix == ".ipynb":
                yield _notebook(path, found)
            else:
                text = read_python(path, LARGEST_CODE)
                tree = parse_python_text(text)
                # form feeds are line ends for splitlines, and none for Python
                text = re.sub(r"[\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", " ", text)
                last = text.count("\n") + 1
                yield _File(path, text, [(None, number) for number in range(1, last + 1)], tree)
        except TextError as error:
            found.skipped[str(path)] = str(error)


def _notebook(path: Path, found: Scan) -> _File:
    """Return a notebook's cells as one file, so that names of one are known in the next."""
    texts: list[str] = []
    places: list[tuple[int | None, int]] = []
    for cell in notebook_cells(path):
        if _is_python(cell, path, found):
            lines = cell.code.split("\n")
            texts += lines
            places += [(cell.number, number) for number in range(1, len(lines) + 1)]
    text = "\n".join(texts)
    return _File(path, text, places or [(None, 1)], parse_python_text(text))


def _is_python(cell: Cell, path: Path, found: Scan) -> bool:
    try:
        parse_python_text(cell.code)
    except TextError as error:
        found.skipped[f"{path}:cell {cell.number}"] = str(error)
        return False
    return True


_MAGIC = re.compile(r"^(\s*)(?:[%!?]|\w+(?:\s*,\s*\w+)*\s*=\s*[%!]|[\w.]+\?{1,2}\s*$).*$")
"""A line of IPython's: `%matplotlib inline`, `!ls`, `files = !ls`, `model?`."""
_STILL_PYTHON = re.compile(r"^%%(time|timeit|capture|prun)\b")
"""Magics of a whole cell whose other lines are Python."""


@dataclass(frozen=True)
class Cell:
    number: int
    """Among all cells, from 1."""
    code: str


def notebook_cells(path: Path) -> list[Cell]:
    """Return the cells with Python code; raises a `TextError` if the file is no notebook.

    Lines of IPython's own become `pass`, so that lines keep their numbers.
    """
    found = read_json(path)
    cells = found.get("cells") if isinstance(found, dict) else None
    if not isinstance(cells, list):
        raise TextError("is no notebook: it has no list of cells (nbformat 4)")
    return list(_code_cells(cells))


def _code_cells(cells: list[Any]) -> Iterator[Cell]:
    for number, cell in enumerate(cells, start=1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        text = "".join(map(str, source)) if isinstance(source, list) else str(source)
        if text.lstrip().startswith("%%") and not _STILL_PYTHON.match(text.lstrip()):
            continue
        lines = (_MAGIC.sub(r"\1pass", line) for line in text.splitlines())
        yield Cell(number, "\n".join(lines))
