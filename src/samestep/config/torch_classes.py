"""The optimizers and schedulers of the installed torch, from its source: importing it takes seconds."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from samestep.config.names import Named, NamedClasses
from samestep.errors import TextError
from samestep.parsing.python_text import parse_python

_OPTIMIZER, _SCHEDULER = "Optimizer", "LRScheduler"


@cache
def torch_optimizers() -> NamedClasses:
    """Those of torch.optim; none where its source cannot be read."""
    classes = {name: node for tree in _trees().values() for name, node in _classes(tree).items()}
    public = _trees().get("__init__", ast.Module([], []))
    imports = [node for node in public.body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    return _named({name: classes[name] for name in names & classes.keys()}, classes, _OPTIMIZER)


@cache
def torch_schedulers() -> NamedClasses:
    """Those of torch.optim.lr_scheduler; none where its source cannot be read."""
    classes = _classes(_trees().get("lr_scheduler", ast.Module([], [])))
    return _named(classes, classes, _SCHEDULER)


@cache
def _trees() -> Mapping[str, ast.Module]:
    """Return the modules of torch.optim by name, parsed and not run."""
    spec = find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found: dict[str, ast.Module] = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("optim/*.py")):
        try:
            found[path.stem] = parse_python(path)
        except TextError:
            return {}  # then nothing is known, and nothing refused
    return found


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _named(wanted: Mapping[str, ast.ClassDef], known: Mapping[str, ast.ClassDef], base: str) -> NamedClasses:
    found = {}
    for name in sorted(wanted, key=str.lower):
        family = _family(name, known)
        constructor = next((init for node in family if (init := _constructor(node))), None)
        public = not name.startswith("_") and name != base
        if public and constructor is not None and base in {node.name for node in family}:
            found[name.lower()] = Named(name, _takes(constructor))
    return found


def _family(name: str, known: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and those that it extends, the nearest first."""
    family: list[ast.ClassDef] = []
    waiting = [name]
    while waiting:
        node = known.get(waiting.pop(0))
        if node is not None and node not in family:
            family.append(node)
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return family


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return next((method for method in methods if method.name == "__init__"), None)


def _takes(constructor: ast.FunctionDef) -> dict[str, inspect.Parameter]:
    found = constructor.args
    plain = [arg.arg for arg in found.args]
    optional = set(plain[len(plain) - len(found.defaults) :])
    optional |= {arg.arg for arg, default in zip(found.kwonlyargs, found.kw_defaults, strict=True) if default}
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    return {
        name: inspect.Parameter(name, kind, default=... if name in optional else empty)
        for name in [*plain[1:], *(arg.arg for arg in found.kwonlyargs)]
    }
