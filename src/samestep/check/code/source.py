"""One file as a syntax tree, with what rules ask of it: names, surroundings, and what trains in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef

DRIVERS = frozenset({"samestep", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed"})
"""Libraries that deal out data and prints to ranks by themselves."""

_LOADER = re.compile(r"loader|(^|_)dl$|data_?iter|batches$|batch_iter|iterator", re.IGNORECASE)
_OPTIMIZER = re.compile(r"^torch\.optim\.[A-Z]|(^|\.)optim\.[A-Z]\w*$|AdamW$|Adafactor$")
Loop = ast.For | ast.AsyncFor | ast.While


@dataclass(eq=False)
class Code:
    """A parsed file, or a notebook's cells one after the other; and which of its lines belong to a training."""

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

    def loop_of(self, node: ast.AST) -> ast.For | None:
        """Return the innermost `for` that holds a node."""
        return next((outer for outer in self.around(node) if isinstance(outer, ast.For)), None)

    # -- what trains ---------------------------------------------------------------------------

    @cached_property
    def _backwards(self) -> list[ast.Call]:
        """Calls of `loss.backward()`, `scaler.scale(loss).backward()`, `run.backward(loss)`.

        None where no optimizer steps: gradients are also for pictures of what a model looks at.
        """
        steps = any(True for _ in self.methods("step", "update"))
        return [call for call in self.methods("backward") if steps and not _is_definition(call)]

    @cached_property
    def trains(self) -> bool:
        """Return whether there is a training, or an optimizer for one."""
        return bool(self._backwards) or any(map(_OPTIMIZER.search, self._by_name))

    @cached_property
    def _trainers(self) -> set[Function]:
        """Functions that hold a backward pass, or call one that does."""
        found = {f for call in self._backwards if (f := self.function_of(call))}
        while (
            more := {outer for call in self.calls if self.targets(call) & found and (outer := self.function_of(call))}
            - found
        ):
            found |= more
        return found

    @cached_property
    def loops(self) -> set[ast.AST]:
        """Loops that train: over batches, and over epochs."""
        inside = [*self._backwards, *(c for c in self.calls if self.targets(c) & self._trainers)]
        return {
            outer
            for call in inside
            for outer in self.around(call)
            if isinstance(outer, (ast.For, ast.AsyncFor, ast.While))
            if self.function_of(outer) is self.function_of(call)
        }

    @cached_property
    def _repeated(self) -> set[Function]:
        """Functions that such loops call, by way of others too; and steps that other files call."""
        found: set[Function] = set()
        waiting = [c for loop in self.loops for c in ast.walk(loop) if isinstance(c, ast.Call)]
        while waiting:
            for function in self.targets(waiting.pop()) - found:
                found.add(function)
                waiting += [c for c in ast.walk(function) if isinstance(c, ast.Call)]
        uncalled = {f for f in self._trainers if not self.calls_by_last_name.get(f.name)}
        return found | {f for f in uncalled if not any(inner in self.loops for inner in ast.walk(f))}

    def repeats(self, node: ast.AST) -> bool:
        """Return whether a line runs again and again while the training does."""
        around = list(self.around(node))
        if any(outer in self.loops for outer in around):
            return True
        return any(outer in self._repeated for outer in around)

    def every_step(self, node: ast.AST) -> bool:
        """Return whether a line runs with every batch of the training, and not with each n-th."""
        for outer in self.around(node):
            if isinstance(outer, ast.If) and _is_now_and_then(outer.test):
                return False
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # A step of its own: what calls it loops.
                return outer in self._repeated and self._has_own_backward(outer)
            if outer in self.loops:
                return self._is_innermost(outer)
        return False

    def _has_own_backward(self, function: Function) -> bool:
        return any(self.function_of(call) is function for call in self._backwards)

    def _is_innermost(self, loop: ast.AST) -> bool:
        """Return whether it is the loop over batches: the backward pass is in it, and in none further inside."""
        return any(
            next(o for o in self.around(call) if isinstance(o, (ast.For, ast.While, ast.Module))) is loop
            for call in self._backwards
        )

    @cached_property
    def _functions_by_name(self) -> dict[str, set[Function]]:
        found: dict[str, set[Function]] = {}
        for function in self.functions:
            found.setdefault(function.name, set()).add(function)
        return found

    def targets(self, call: ast.Call) -> set[Function]:
        """Functions of this file that a call may mean: by its name, or as a method of `self`."""
        target = call.func
        if isinstance(target, ast.Attribute) and not (
            isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
        ):
            return set()
        return self._functions_by_name.get(_last_name(target), set())


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return a keyword argument; None if it is not given."""
    return next((word.value for word in call.keywords if word.arg == name), None)


def constant(node: ast.AST | None) -> object:
    """Return the value of a literal; None for anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def identifiers_in(node: ast.AST) -> Iterator[str]:
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


def is_loader(code: Code, node: ast.AST) -> bool:
    """Return whether an expression is called like a loader of batches."""
    name = code.name(node)
    return bool(name) and bool(_LOADER.search(name.rpartition(".")[2]))


def over_batches(code: Code, loop: Loop) -> bool:
    """Return whether a loop is over a loader, by its name."""
    if isinstance(loop, ast.While):
        return False
    over: ast.AST = loop.iter
    while isinstance(over, ast.Call) and over.args:  # enumerate(tqdm(loader))
        over = over.args[0]
    return is_loader(code, over)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_now_and_then(test: ast.AST) -> bool:
    return any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod) for n in ast.walk(test))


def _is_definition(call: ast.Call) -> bool:
    """`super().backward(...)` of an autograd function is no training."""
    value = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
