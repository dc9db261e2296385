"""Checks the file of a config's task without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samestep.config.schema import Config
from samestep.errors import Mistake, TextError
from samestep.parsing.python_text import parse_python

_DYNAMIC = ("globals", "vars", "locals", "exec", "setattr", "__import__")
"""Calls by which a module can get a name that is not written in it."""


@dataclass(frozen=True)
class TaskFile:
    """The place of a task, and what is wrong with it."""

    path: Path
    class_name: str
    wrong: str = ""
    """Why it cannot be used; empty if nothing speaks against it."""
    advice: str = ""
    is_certain: bool = True
    """False if only running the file would tell whether it has the class."""


def look_at_task(config: Config) -> TaskFile | None:
    """Return the task's file and class; None for a config without a task."""
    if config.task is None:
        return None
    name, _, wanted = config.task.rpartition(":")
    path = config.folder / name
    try:
        tree = parse_python(path)
    except TextError as error:
        advice = "put it there on every machine, or set task; its path is relative to the config"
        advice = "fix that line" if "on line" in str(error) else advice
        return TaskFile(path, wanted, f"{path} {error}", advice)
    if wanted in set(_names(tree.body)):
        return TaskFile(path, wanted)
    if _is_dynamic(tree):
        return TaskFile(path, wanted, is_certain=False)
    classes = ", ".join(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    wrong = f"{path} defines no class {wanted}; it has {classes or 'none'}"
    return TaskFile(path, wanted, wrong, "write FILE.py:Class with a class of that file")


def task_mistakes(config: Config) -> list[Mistake]:
    """Return what is wrong with the task's file, as a config's mistake."""
    found = look_at_task(config)
    wrong = found is not None and ":" in str(config.task) and found.wrong
    return [Mistake("task", f"{found.wrong}: {found.advice}")] if wrong and found else []


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module give it."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:
            inside = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            yield from (part.id for part in inside if isinstance(part.ctx, ast.Store))
            for field in ("body", "orelse", "finalbody", "handlers"):
                for part in getattr(node, field, []):
                    yield from _names(part.body if isinstance(part, ast.ExceptHandler) else [part])


def _is_dynamic(tree: ast.Module) -> bool:
    if "*" in _names(tree.body) or "__getattr__" in _names(tree.body):
        return True
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id in _DYNAMIC for call in calls)
