"""Rules about code that uses samestep already: what it still computes on each rank by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from samestep.check.code.loading import LOADER
from samestep.check.code.rule import Rule
from samestep.check.code.training import Code

_READERS = frozenset({"enumerate", "tqdm", "zip", "iter", "next", "len", "islice", "list", "print"})
"""Functions that only read a loader; another one that gets it may deal it out."""


def _whole_loaders(code: Code) -> Iterator[ast.AST]:
    if not code.is_ported:
        return
    for call in code.calls:
        line = code.parents[call]
        if not (LOADER.match(code.name(call.func)) and isinstance(line, ast.Assign)):
            continue
        names = {target.id for target in line.targets if isinstance(target, ast.Name)}
        uses = [
            node
            for node in ast.walk(code.scope_of(call))
            if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)
        ]
        if not any(_is_handed_on(code, use) for use in uses):
            yield from (use for use in uses if _is_looped_over(code, use))


def _is_handed_on(code: Code, use: ast.Name) -> bool:
    """Return whether something else may have made of it what each rank is to read."""
    outer = code.parents[use]
    if isinstance(outer, ast.Call):
        return code.name(outer.func).rpartition(".")[2] not in _READERS
    return isinstance(
        outer, (ast.Assign, ast.Return, ast.Yield, ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.keyword)
    )


def _is_looped_over(code: Code, use: ast.Name) -> bool:
    return any(
        use in ast.walk(outer.iter)
        for outer in code.around(use)
        if isinstance(outer, (ast.For, ast.AsyncFor, ast.comprehension))
    )


RULES = (
    Rule(
        "whole-loader", "differs", "a loop over a loader that the run did not get",
        "every rank reads all of its samples: a sum over the ranks counts each sample once for each of them",
        "give it to `run.prepare` with the training loader, or loop over `run.eval_batches(loader)`",
        _whole_loaders,
    ),
)  # fmt: skip
