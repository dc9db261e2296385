"""Rules about numbers: losses that are read in every step, means of means, losses of a whole batch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from samestep.check.code.guards import on_one_rank, once_a_step
from samestep.check.code.rule import Rule
from samestep.check.code.source import Code, identifiers_in, is_loader, over_batches

_MEASURE = re.compile(r"loss|acc|correct|score|metric|error|total|running|sum|f1|psnr|iou|dice", re.IGNORECASE)
_BATCH_LOSS = re.compile(
    r"(SupCon|NT_?Xent|Info_?NCE|ClipLoss|CLIPLoss|BarlowTwins|VICReg|MultipleNegativesRanking)(Loss|Criterion)?$"
)
_MEANS = frozenset({"numpy.mean", "statistics.mean", "statistics.fmean", "numpy.average", "numpy.nanmean"})
_REDUCES = re.compile(r"reduce|gather|sync")


def _read_each_step(code: Code) -> Iterator[ast.AST]:
    for call in code.methods("item"):
        if not call.args and code.every_step(call) and not on_one_rank(code, call):
            yield call


def _means_of_means(code: Code) -> Iterator[ast.AST]:
    for node in code.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if _counts_batches(code, node.right) and _is_measure(code, node.left):
                yield node
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
            if _counts_batches(code, node.value) and _is_measure(code, node.target):
                yield node
        elif isinstance(node, ast.Call) and _is_mean_of_batches(code, node):
            yield node


def _counts_batches(code: Code, node: ast.AST) -> bool:
    """`len(loader)`, or a list that gets an entry with each batch."""
    if not (isinstance(node, ast.Call) and code.name(node.func) == "len" and len(node.args) == 1):
        return False
    return is_loader(code, node.args[0]) or _grows_by_batch(code, node.args[0])


def _is_measure(code: Code, node: ast.AST) -> bool:
    """Something that was added up over batches: not the number of a batch, which shows progress."""
    indices = {
        inner.id
        for loop in code.around(node)
        if isinstance(loop, ast.For)
        for inner in ast.walk(loop.target)
        if isinstance(inner, ast.Name)
    }
    words = [word for word in identifiers_in(node) if word not in indices]
    # A mean over samples times their number is right; so is what all ranks were asked for.
    if any(_REDUCES.search(word) for word in words) or _adds_steps(code, node):
        return False
    return any(_MEASURE.search(word) for word in words)


def _adds_steps(code: Code, node: ast.AST) -> bool:
    """Return whether it was added up once a step, of losses of the whole global batch."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return any(
        isinstance(line, ast.AugAssign) and code.name(line.target) in names and once_a_step(code, line)
        for line in ast.walk(code.scope_of(node))
    )


def _is_mean_of_batches(code: Code, call: ast.Call) -> bool:
    if code.name(call.func) in _MEANS and call.args:
        return _grows_by_batch(code, call.args[0])
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "mean" and not call.args):
        return False
    # torch.stack(losses).mean(), torch.tensor(losses).mean()
    made = call.func.value
    joins = ("torch.stack", "torch.tensor", "numpy.array", "torch.cat")
    if not (isinstance(made, ast.Call) and made.args and code.name(made.func) in joins):
        return False
    return _grows_by_batch(code, made.args[0])


def _grows_by_batch(code: Code, node: ast.AST) -> bool:
    """Return whether a list gets a loss or metric of each batch of a loop over a loader."""
    name = code.name(node)
    if not name:
        return False
    for call in ast.walk(code.scope_of(node)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if call.func.attr != "append" or code.name(call.func.value) != name or not call.args:
            continue
        if once_a_step(code, call):
            continue
        innermost = code.loop_of(call)
        if innermost is not None and over_batches(code, innermost) and _is_of_a_batch(call.args[0]):
            return True
    return False


def _is_of_a_batch(node: ast.AST) -> bool:
    """One number: `loss`, `loss.item()`, `accuracy(...)`; not rows, or times of a clock."""
    words = list(identifiers_in(node))
    return any(re.search(r"loss|acc|metric|score|f1|error", word, re.IGNORECASE) for word in words)


def _batch_losses(code: Code) -> Iterator[ast.AST]:
    for call in code.calls:
        name = code.name(call.func)
        if _BATCH_LOSS.search(name.rpartition(".")[2]) and not name.startswith("samestep"):
            yield call


RULES = (
    Rule(
        "item-per-step", "slows", "`.item()` in every step",
        "the host waits for the device in every step, and the number is that of this rank's samples alone",
        "read it now and then: `step.loss` is the loss of the whole global batch on every rank; the run logs it with every "
        "step by itself, without a wait",
        _read_each_step, plain=True,
    ),
    Rule(
        "mean-of-means", "differs", "a metric averaged over batches",
        "the last batch is smaller and counts as much as the others; split over ranks, the batches differ, and so does the mean",
        "sums and counts: a list of `reduction=\"sum\"` losses, then `run.reduce(losses) / len(dataset)`; or `run.gather` and a "
        "metric over all rows",
        _means_of_means, files="uses_torch",
    ),
    Rule(
        "batch-loss", "differs", "a loss over the whole batch",
        "it compares the samples of a batch with each other: over a rank's part of them it is another loss",
        "`step.train_global(embed, loss)` or `Task.batch_loss`, with `samestep.losses`: over the global batch at any number of ranks",
        _batch_losses, plain=True,
    ),
)  # fmt: skip
