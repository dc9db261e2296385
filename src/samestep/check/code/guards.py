"""Decides whether a line runs on one rank only, or only where there is a GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from samestep.check.code.source import Code, Function, identifiers_in

_RANK = re.compile(
    r"(^|_)(rank|ranks|local_rank|rank0|main|master|primary|chief|leader|coordinator)(_|$|\d)"
    r"|is_main|is_global_zero|rank_zero|global_rank|world_size|is_distributed|gpu_id|process_index",
    re.IGNORECASE,
)
_TASK_HOOKS = frozenset({"on_save", "on_end", "evaluate_gathered"})
"""Methods of a task that run on rank 0 alone."""
_GPU = re.compile(r"cuda|gpu|accel|is_available|device|nccl|distributed|rank", re.IGNORECASE)


def names_a_rank(node: ast.AST) -> bool:
    """Return whether an expression asks which rank this is."""
    return any(_RANK.search(word) for word in identifiers_in(node) if word != "__main__")


def on_one_rank(code: Code, node: ast.AST) -> bool:
    """Return whether a line is behind a check of the rank, as far as this file shows."""
    hooks = (getattr(outer, "name", "") in _TASK_HOOKS for outer in code.around(node))
    return (code.is_ported and any(hooks)) or _guarded(code, node, _RANK, frozenset())


def where_a_gpu_is(code: Code, node: ast.AST) -> bool:
    """Return whether a line is behind a question for a GPU, as far as this file shows."""
    caught = any(isinstance(outer, ast.Try) and outer.handlers for outer in code.around(node))
    return caught or _guarded(code, node, _GPU, frozenset())


def _guarded(code: Code, node: ast.AST, asks: re.Pattern[str], seen: frozenset[Function]) -> bool:
    if any(_asks(test, asks) for test in _tests_before(code, node)):
        return True
    function = code.function_of(node)
    if function is None or function in seen:
        return False
    if any(_asks(mark, asks) for mark in function.decorator_list):
        return True
    # A helper whose callers all ask is as good as behind the question itself.
    calls = [c for c in code.calls_by_last_name.get(function.name, ()) if function in code.targets(c)]
    return bool(calls) and all(_guarded(code, call, asks, seen | {function}) for call in calls)


def _asks(test: ast.AST, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(word) for word in identifiers_in(test) if word != "__main__")


def _tests_before(code: Code, node: ast.AST) -> Iterator[ast.AST]:
    """Conditions that decide whether a node is reached: around it, or by leaving its block before."""
    for outer in code.around(node):
        if isinstance(outer, (ast.If, ast.IfExp, ast.While)) and node is not outer.test:
            yield outer.test
        elif isinstance(outer, ast.BoolOp):
            yield from outer.values[: _position(outer.values, node)]
        for block in _blocks(outer):
            if node in block:
                yield from _left_before(block[: block.index(node)])
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        node = outer


def _position(values: list[ast.expr], node: ast.AST) -> int:
    return next((place for place, value in enumerate(values) if value is node), len(values))


def _blocks(node: ast.AST) -> Iterator[list[ast.AST]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _left_before(block: list[ast.AST]) -> Iterator[ast.AST]:
    """Tests of `if not main: return`, and of assertions, in the lines before."""
    leaves = (ast.Return, ast.Continue, ast.Raise, ast.Break)
    for line in block:
        if isinstance(line, ast.If) and isinstance(line.body[-1], leaves):
            yield line.test
        if isinstance(line, ast.Assert):
            yield line.test


def once_a_step(code: Code, node: ast.AST) -> bool:
    """Return whether a line is in a loop over the steps of a run: there a loss is that of all lanes of all ranks."""
    innermost = code.loop_of(node)
    return code.is_ported and innermost is not None and _over_steps(code, innermost.iter)


def _over_steps(code: Code, over: ast.expr) -> bool:
    """Return whether it is `run.steps(...)`, `run.enumerate(...)`, or a loader that `run.prepare` returned."""
    if isinstance(over, ast.Call):
        name = code.name(over.func)
        if name.endswith((".steps", ".enumerate")):
            return True
        return name in ("enumerate", "tqdm", "tqdm.tqdm") and bool(over.args) and _over_steps(code, over.args[0])
    return isinstance(over, ast.Name) and over.id in _prepared_names(code)


def _prepared_names(code: Code) -> set[str]:
    """Return the names assigned from `run.prepare(...)`, but for what looks like validation data."""
    found: set[str] = set()
    for node in code.nodes:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        if code.name(node.value.func).endswith(".prepare"):
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            found |= {name for name in names if not name.startswith(_MEASURED)}
    return found


_MEASURED = ("valid", "val", "test", "eval", "dev")
