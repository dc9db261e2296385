"""One file as a syntax tree, with what rules ask of it: names, surroundings, and what trains in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef

DRIVERS = frozenset({"samestep", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed"})
"""Libraries that deal out data and prints to ranks by themselves."""


@dataclass(eq=False)
class Source:
    """A parsed file, or a notebook's cells one after the other."""

    tree: ast.Module
    lines: list[str]
    sets_epochs: bool = False
    """Whether a file of its folder calls `set_epoch`."""
    parents: dict[ast.AST, ast.AST] = field(init=False)
    nodes: list[ast.AST] = field(init=False)

    def __post_init__(self) -> None:
        self.parents, self.nodes = {}, [self.tree]
        for node in self.nodes:  # grows while it is read
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                self.nodes.append(child)

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def functions(self) -> list[Function]:
        return [n for n in self.nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def imports(self) -> dict[str, str]:
        """Return what each imported name stands for: `nn` for `torch.nn`."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                home = "." * node.level + (node.module or "")
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{home}.{alias.name}"
        return found

    @cached_property
    def packages(self) -> set[str]:
        """Return the first names of the packages of which something is imported."""
        return {name.partition(".")[0] for name in self.imports.values()}

    @property
    def uses_torch(self) -> bool:
        return bool(self.packages & {"torch", "torchvision", *DRIVERS})

    @property
    def is_driven(self) -> bool:
        """Return whether a library of `DRIVERS` has the loop."""
        return bool(self.packages & DRIVERS)

    @property
    def is_ported(self) -> bool:
        return "samestep" in self.packages

    def name(self, node: ast.AST | None) -> str:
        """Return the full name of what is called or read: `torch.nn.Linear`; empty for what is computed.

        Of `self.net.cuda` that is `self.net.cuda`, and of `make()[0].cuda` it is `?.cuda`.
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            parts.append(self.imports.get(node.id, node.id))
        elif parts:
            parts.append("?")
        return ".".join(reversed(parts))

    def called(self, *names: str) -> Iterator[ast.Call]:
        """Calls of these full names."""
        return (call for name in names for call in self._by_name.get(name, ()))

    def methods(self, *names: str) -> Iterator[ast.Call]:
        """Calls of something's method of one of these names."""
        return (
            call
            for name, calls in self._by_name.items()
            if name.rpartition(".")[2] in names
            for call in calls
            if isinstance(call.func, ast.Attribute)
        )

    @cached_property
    def _by_name(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            found.setdefault(self.name(call.func), []).append(call)
        return found

    @cached_property
    def calls_by_last_name(self) -> dict[str, list[ast.Call]]:
        """Calls by the last part of what they call."""
        found: dict[str, list[ast.Call]] = {}
        for name, calls in self._by_name.items():
            found.setdefault(name.rpartition(".")[2], []).extend(calls)
        return found

    def variables_set(self, *names: str) -> Iterator[ast.Assign]:
        """Assignments to `os.environ[name]`."""
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                places = [t for t in node.targets if isinstance(t, ast.Subscript)]
                if any(self.name(t.value) == "os.environ" and constant(t.slice) in names for t in places):
                    yield node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what holds a node, from the inside out."""
        while (outer := self.parents.get(node)) is not None:
            yield outer
            node = outer

    def function_of(self, node: ast.AST) -> Function | None:
        """Return the innermost function that holds a node."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return next((outer for outer in self.around(node) if isinstance(outer, kinds)), None)

    def scope_of(self, node: ast.AST) -> ast.AST:
        """Return the innermost function, or the file."""
        return self.function_of(node) or self.tree


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return a keyword argument; None if it is not given."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def constant(node: ast.AST | None) -> object:
    """Return the value of a literal; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def words_of(node: ast.AST) -> Iterator[str]:
    """Names, attributes and texts in an expression."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value
        elif isinstance(inner, ast.keyword) and inner.arg:
            yield inner.arg
