"""Code that trains: its loops, and the functions that they call."""

from __future__ import annotations

import ast
import re
from functools import cached_property

from samestep.check.code.source import Function, Source

_LOADER = re.compile(r"loader|(^|_)dl$|data_?iter|batches$|batch_iter|iterator", re.IGNORECASE)
_OPTIMIZER = re.compile(r"^torch\.optim\.[A-Z]|(^|\.)optim\.[A-Z]\w*$|AdamW$|Adafactor$")
Loop = ast.For | ast.AsyncFor | ast.While


class Code(Source):
    """A file, with which of its lines belong to a training."""

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
            more := {outer for call in self.calls if self._targets(call) & found and (outer := self.function_of(call))}
            - found
        ):
            found |= more
        return found

    @cached_property
    def loops(self) -> set[ast.AST]:
        """Loops that train: over batches, and over epochs."""
        inside = [*self._backwards, *(c for c in self.calls if self._targets(c) & self._trainers)]
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
            for function in self._targets(waiting.pop()) - found:
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

    def _targets(self, call: ast.Call) -> set[Function]:
        """Functions of this file that a call may mean: by its name, or as a method of `self`."""
        target = call.func
        if isinstance(target, ast.Attribute) and not (
            isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
        ):
            return set()
        return self._functions_by_name.get(_last_name(target), set())


def is_loader(source: Source, node: ast.AST) -> bool:
    """Return whether an expression is called like a loader of batches."""
    name = source.name(node)
    return bool(name) and bool(_LOADER.search(name.rpartition(".")[2]))


def over_batches(source: Source, loop: Loop) -> bool:
    """Return whether a loop is over a loader, by its name."""
    if isinstance(loop, ast.While):
        return False
    over: ast.AST = loop.iter
    while isinstance(over, ast.Call) and over.args:  # enumerate(tqdm(loader))
        over = over.args[0]
    return is_loader(source, over)


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
