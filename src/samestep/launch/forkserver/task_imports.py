"""The installed packages that a task's file imports, found without running it.

The task's own code is left to each run: a module that draws numbers or opens files when it is imported
must do so in every one of them.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import TextError
from samestep.parsing.python_text import parse_python

_MOST_FILES = 200
"""Files of a task that are looked at: in a folder with more, runs import the rest themselves."""


@dataclass(frozen=True)
class TaskImports:
    """The modules that a task's file, and files beside it that it imports, import."""

    task: Path
    names: tuple[str, ...]
    """Modules, or `module:name` for a name of a module; in the order of the files."""

    @classmethod
    def of(cls, task: Path) -> TaskImports:
        """Look at a task's file; one that is no Python has no imports, and its runs tell why."""
        found: dict[str, None] = {}
        seen, waiting = set[Path](), [task]
        while waiting and len(seen) < _MOST_FILES:
            path = waiting.pop(0)
            if path in seen:
                continue
            seen.add(path)
            for name in _imports(path):
                beside = _beside(task.parent, name.partition(":")[0])
                if beside is None:
                    found[name] = None
                else:
                    waiting += beside
        return cls(task, tuple(found))

    def load(self, name: str) -> None:
        """Import one of them; a name of a module may be what makes it import a part of itself."""
        module, _, attribute = name.partition(":")
        loaded = importlib.import_module(module)
        if attribute and not hasattr(loaded, attribute):
            importlib.import_module(f"{module}.{attribute}")

    def hidden_by_imports(self) -> str:
        """Return which file of the task no run could import, since a package of that name already is."""
        for path in sorted(self.task.parent.iterdir()):
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            known = sys.modules.get(path.stem) if is_module else None
            file = str(getattr(known, "__file__", None))
            if known is not None and not file.startswith(str(path.parent)):
                return f"{path} has the name of a package that is imported before it"
        return ""


def _imports(path: Path) -> Iterator[str]:
    """Yield what a file imports when it is imported itself: not what its functions do."""
    try:
        waiting: list[ast.AST] = [parse_python(path)]
    except TextError:
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{alias.name}" for alias in node.names if alias.name != "*")
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _beside(folder: Path, module: str) -> list[Path] | None:
    """Return the files of a module that is the task's own; None if it is none of those."""
    root = module.partition(".")[0]
    if (folder / f"{root}.py").is_file():
        return [folder / f"{root}.py"]
    if (folder / root).is_dir():
        return sorted((folder / root).rglob("*.py"))
    return None
