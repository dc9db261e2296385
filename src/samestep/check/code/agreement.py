"""Rules about what all ranks must do alike: calls, decisions, and states that pass from batch to batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from samestep.check.code.rule import Rule
from samestep.check.code.source import Code, identifiers_in, over_batches

_MAIN = re.compile(
    r"^(is_main|is_main_process|is_master|is_global_zero|is_rank_zero|is_rank0|main_process|rank|global_rank)$"
)
_OF_ALL = frozenset({"reduce", "gather", "evaluate", "retrieval", "evaluate_gathered", "save"})
"""Methods of a run that every rank calls."""
_COLLECTIVES = re.compile(r"^torch\.distributed\.(all_|barrier|broadcast|reduce|gather|scatter|monitored_barrier)")
_MEASURED = re.compile(r"loss|acc|correct|score|metric|error|f1|iou|dice|right", re.IGNORECASE)
_JOINED = re.compile(r"reduce|gather|evaluate|sync|mean_over|retrieval")
_WRAPPERS = frozenset({"DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP"})


def _calls_of_one(code: Code) -> Iterator[ast.AST]:
    for call in code.calls:
        name = code.name(call.func)
        home, _, last = name.rpartition(".")
        ours = code.is_ported and last in _OF_ALL and home.rpartition(".")[2] == "run"
        if (ours or _COLLECTIVES.match(name)) and _behind_main(code, call):
            yield call


def _behind_main(code: Code, call: ast.AST) -> bool:
    """Return whether a line is in the body of `if is_main:`, or of `if rank == 0:`."""
    inner: ast.AST = call
    for outer in code.around(call):
        if isinstance(outer, ast.If) and inner in outer.body and _asks_for_main(outer.test):
            return True
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        inner = outer
    return False


def _asks_for_main(test: ast.AST) -> bool:
    if isinstance(test, ast.UnaryOp):
        return False
    return any(_MAIN.match(word) for word in identifiers_in(test))


def _own_decisions(code: Code) -> Iterator[ast.AST]:
    """`if val_loss < best:` of a number that this rank has added up over its own batches."""
    for node in code.nodes:
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare)):
            continue
        names = {word for word in identifiers_in(node.test) if _MEASURED.search(word)}
        if any(_is_own(code, node, name) for name in names):
            yield node.test


def _is_own(code: Code, node: ast.AST, name: str) -> bool:
    scope = code.scope_of(node)
    adds, joins = False, False
    for line in ast.walk(scope):
        if isinstance(line, ast.AugAssign) and code.name(line.target) == name:
            innermost = code.loop_of(line)
            adds = adds or (innermost is not None and over_batches(code, innermost))
        elif isinstance(line, ast.Assign) and name in map(code.name, line.targets):
            joins = joins or any(_JOINED.search(word) for word in identifiers_in(line.value))
    return adds and not joins


def _carried_states(code: Code) -> Iterator[ast.AST]:
    """`output, hidden = model(data, hidden)` in the loop over batches."""
    for node in code.nodes:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        if not code.every_step(node):
            continue
        targets = {
            part.id
            for target in node.targets
            if isinstance(target, ast.Tuple)
            for part in target.elts
            if isinstance(part, ast.Name)
        }
        given = {one.id for one in node.value.args if isinstance(one, ast.Name)}
        if targets & given:
            yield node


def _batch_statistics(code: Code) -> Iterator[ast.AST]:
    """`(x - x.mean()) / (x.std() + 1e-8)` in the training: over a rank's own samples."""
    for node in code.nodes:
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
            continue
        top = node.left
        if not (isinstance(top, ast.BinOp) and isinstance(top.op, ast.Sub)):
            continue
        whole = f"{ast.unparse(top.left)}."
        means = ast.unparse(top.right).startswith(f"{whole}mean(")
        if means and f"{whole}std(" in ast.unparse(node.right) and code.repeats(node):
            yield node


def _early_breaks(code: Code) -> Iterator[ast.AST]:
    for node in code.nodes:
        if isinstance(node, ast.Break) and code.every_step(node):
            yield node


def _left_wrappers(code: Code) -> Iterator[ast.AST]:
    for call in code.calls:
        if code.name(call.func).rpartition(".")[2] in _WRAPPERS:
            yield call


RULES = (
    Rule(
        "call-by-one", "breaks", "a call of all ranks behind a check of the rank",
        "the others never make it: this rank waits for them, and they for it somewhere else",
        "make the call on every rank, and check the rank around what follows: `total = run.reduce(...)`, then `if run.is_main:`",
        _calls_of_one,
    ),
    Rule(
        "own-decision", "differs", "a decision by this rank's own measurement",
        "each rank has measured its own samples: one may stop, or save, where another does not",
        "decide by what all ranks have measured: `loss = run.reduce(losses) / len(dataset)`",
        _own_decisions, files="is_ported",
    ),
    Rule(
        "carried-state", "differs", "a state that passes from one batch to the next",
        "the next batch continues it only if the same rank has both, in the same order: at another number of ranks it is another state",
        "begin each batch with a state of its own, or keep it by lane in a buffer of the model",
        _carried_states,
    ),
    Rule(
        "batch-statistics", "differs", "numbers normalised over a batch",
        "each rank, and each lane, has a part of the batch, whose mean and deviation are others",
        "normalise before the data is cut into batches, or over all of it: `run.reduce` of sums and counts",
        _batch_statistics,
    ),
    Rule(
        "early-break", "breaks", "a `break` in the loop over batches",
        "an epoch is one pass over the data: a loop over `run.epochs()` refuses a shorter one",
        "`run.stop(reason)` on every rank, `steps=` for a shorter run, or `break` in the loop over `run.epochs()`",
        _early_breaks, files="is_ported",
    ),
    Rule(
        "left-wrapper", "breaks", "a model that is still wrapped",
        "DistributedDataParallel would add up gradients a second time: `run.prepare` refuses it",
        "leave it out: `run.prepare(model, ...)` takes the model itself",
        _left_wrappers, files="is_ported",
    ),
)  # fmt: skip
