"""Rules about data: who reads which samples, and in which order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from samestep.check.code.guards import on_one_rank
from samestep.check.code.rule import Rule
from samestep.check.code.source import Code, constant, keyword

LOADER = re.compile(r"^torch\.utils\.data\.(dataloader\.)?DataLoader$|^torch_geometric\..*DataLoader$")
_SAMPLER = re.compile(r"(^|\.)DistributedSampler$")
_RANDOM_SAMPLER = re.compile(r"^torch\.utils\.data\.(sampler\.)?(\w*Random)Sampler$")
_EVALUATION = re.compile(r"(^|[._])(test|val|valid|validation|eval|dev)", re.IGNORECASE)
_UNSORTED = frozenset({"os.listdir", "glob.glob", "glob.iglob", "os.scandir"})
_ORDERLESS = frozenset({"sorted", "len", "set", "any", "all", "natsort.natsorted"})
_UNSORTED_METHODS = frozenset({"iterdir", "glob", "rglob"})


def _shuffled(code: Code) -> Iterator[ast.AST]:
    for call in code.calls:
        if not LOADER.match(code.name(call.func)):
            continue
        sampler = keyword(call, "sampler") or keyword(call, "batch_sampler")
        if sampler is not None and _is_never_set(code, sampler):
            sampler = None
        shuffle = _argument(call, "shuffle", 2)
        asks = isinstance(shuffle, ast.Compare)  # shuffle=(sampler is None)
        shuffles = asks or constant(shuffle) is True or _shuffles_by_options(code, call)
        draws = isinstance(sampler, ast.Call) and _RANDOM_SAMPLER.match(code.name(sampler.func))
        if ((sampler is None and shuffles) or draws) and not _is_for_evaluation(code, call):
            yield call


def _is_for_evaluation(code: Code, call: ast.Call) -> bool:
    """Return whether it is kept under a name of data that nobody trains on: its order does not matter."""
    line = code.parents[call]
    targets = line.targets if isinstance(line, ast.Assign) else []
    return any(_EVALUATION.search(code.name(target)) for target in targets)


def _shuffles_by_options(code: Code, call: ast.Call) -> bool:
    """`DataLoader(dataset, **options)` where its function writes `{"shuffle": True}`."""
    if all(word.arg for word in call.keywords):
        return False
    return any(
        isinstance(node, ast.Dict)
        and any(
            constant(key) == "shuffle" and constant(value) is True
            for key, value in zip(node.keys, node.values, strict=True)
        )
        for node in ast.walk(code.scope_of(call))
    )


def _is_never_set(code: Code, node: ast.AST) -> bool:
    """Return whether a variable is None wherever its function sets it."""
    name = code.name(node)
    set_to = [
        line.value
        for line in ast.walk(code.scope_of(node))
        if isinstance(line, ast.Assign) and name in map(code.name, line.targets)
    ]
    return all(isinstance(value, ast.Constant) and value.value is None for value in set_to) and bool(set_to)


def _argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    """Return an argument by its name or its place."""
    given = keyword(call, name)
    if given is None and len(call.args) > place and not isinstance(call.args[place], ast.Starred):
        return call.args[place]
    return given


def _samplers(code: Code) -> Iterator[ast.Call]:
    return (call for call in code.calls if _SAMPLER.search(code.name(call.func)))


def _same_order_each_epoch(code: Code) -> Iterator[ast.AST]:
    if code.sets_epochs:
        return
    for call in _samplers(code):
        if constant(_argument(call, "shuffle", 3)) is not False:
            yield call


def _padded(code: Code) -> Iterator[ast.AST]:
    # Some evaluate what the sampler leaves out by a loader of its own.
    for rest in code.called("torch.utils.data.Subset"):
        if any(isinstance(part, ast.Attribute) and "sampler" in part.attr for part in ast.walk(rest)):
            return
    for call in _samplers(code):
        if constant(_argument(call, "shuffle", 3)) is False:
            yield call


def _unseeded_splits(code: Code) -> Iterator[ast.AST]:
    seeds = {code.name(call.func) for call in code.calls}
    for call in code.called("torch.utils.data.random_split", "torch.utils.data.dataset.random_split"):
        if _argument(call, "generator", 2) is None and "torch.manual_seed" not in seeds:
            yield call
    if not code.uses_torch:
        return
    for call in code.called("sklearn.model_selection.train_test_split"):
        draws = constant(keyword(call, "shuffle")) is not False
        if draws and keyword(call, "random_state") is None and "numpy.random.seed" not in seeds:
            yield call


def _downloads(code: Code) -> Iterator[ast.AST]:
    for call in code.calls:
        if constant(keyword(call, "download")) is True and not on_one_rank(code, call):
            yield call


def _unsorted_files(code: Code) -> Iterator[ast.AST]:
    """Find unsorted lists of files in datasets, where their order numbers the samples."""
    datasets = [c for c in code.classes if any(getattr(inner, "name", "") == "__getitem__" for inner in c.body)]
    for node in (inner for dataset in datasets for inner in ast.walk(dataset)):
        if not isinstance(node, ast.Call) or not _lists_files(code, node):
            continue
        function = code.function_of(node)  # one sample's own files
        if not _is_sorted(code, node) and getattr(function, "name", "") != "__getitem__":
            yield node


def _lists_files(code: Code, call: ast.Call) -> bool:
    name = code.name(call.func)
    if name in _UNSORTED:
        return True
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    return method in _UNSORTED_METHODS and not name.startswith(("glob.", "os."))


def _is_sorted(code: Code, node: ast.AST) -> bool:
    """Return whether its order does not matter: sorted around it, or as a list of its own later."""
    line: ast.AST = node
    for outer in code.around(node):
        if isinstance(outer, ast.Call) and code.name(outer.func) in _ORDERLESS:
            return True
        if isinstance(outer, ast.Compare):  # whether there are any
            return True
        line = outer
        if isinstance(outer, ast.stmt):
            break
    if not isinstance(line, ast.Assign):
        return False
    targets = {code.name(target) for target in line.targets}
    scope = code.scope_of(node)
    return any(isinstance(call, ast.Call) and _sorts(code, call, targets) for call in ast.walk(scope))


def _sorts(code: Code, call: ast.Call, targets: set[str]) -> bool:
    if isinstance(call.func, ast.Attribute) and call.func.attr == "sort":
        return code.name(call.func.value) in targets
    return code.name(call.func) in ("sorted", "natsort.natsorted") and any(
        code.name(argument) in targets for argument in call.args
    )


def _set_orders(code: Code) -> Iterator[ast.AST]:
    for call in code.called("list", "tuple", "enumerate"):
        if not call.args or not _is_set(code, call.args[0]):
            continue
        if not _is_sorted(code, call):
            yield call


def _is_set(code: Code, node: ast.AST) -> bool:
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "set"


_READERS = frozenset({"enumerate", "tqdm", "zip", "iter", "next", "len", "islice", "list", "print"})
"""Functions that only read a loader; another one that gets it may deal it out."""


def _whole_loaders(code: Code) -> Iterator[ast.AST]:
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
        "shuffled-loader", "differs", "a loader that shuffles by itself",
        "every rank would draw its own order over the whole dataset: samples are seen by several ranks or by none, "
        "and an epoch trains on each of them as often as there are ranks",
        "the same loader, given to `run.prepare(model, optimizer, loader)`: its batch becomes the global batch, which lanes "
        "share, and its order follows from the run's seed",
        _shuffled, plain=True,
    ),
    Rule(
        "sampler-epoch", "differs", "`DistributedSampler` without `set_epoch`",
        "no file of this folder calls `set_epoch`: every epoch has the same order",
        "a plain `DataLoader(dataset, batch_size=GLOBAL, shuffle=True)`, given to `run.prepare`",
        _same_order_each_epoch, plain=True,
    ),
    Rule(
        "padded-evaluation", "differs", "an evaluation by `DistributedSampler`",
        "it repeats samples until all ranks have equally many, or with `drop_last` leaves some out: the metric depends on "
        "the number of ranks",
        "a plain loader, given to `run.prepare` or looped over by `run.eval_batches(loader)`: each sample once",
        _padded, plain=True,
    ),
    Rule(
        "unseeded-split", "differs", "a split without a seed",
        "each rank draws its own: one rank's validation samples are another's training samples",
        "`random_split(dataset, lengths, torch.Generator().manual_seed(0))`, or `random_state=`; or split after `samestep.start(seed=...)`",
        _unseeded_splits, plain=True,
    ),
    Rule(
        "download-by-all", "breaks", "a download on every rank",
        "ranks of a machine write the same files at once, and read what is half written",
        "`run.once_per_node(download)` before, or a download that is no part of the training",
        _downloads, files="uses_torch",
    ),
    Rule(
        "unsorted-files", "differs", "a dataset in the order of a directory",
        "file systems list files in any order: sample 7 is another file on another machine",
        "`sorted(...)` around it",
        _unsorted_files,
    ),
    Rule(
        "set-order", "differs", "the order of a set",
        "texts in a set have another order in each process: ranks would number classes or words differently",
        "`sorted(set(...))`, or `list(dict.fromkeys(...))`",
        _set_orders, files="uses_torch",
    ),
    Rule(
        "whole-loader", "differs", "a loop over a loader that the run did not get",
        "every rank reads all of its samples: a sum over the ranks counts each sample once for each of them",
        "give it to `run.prepare` with the training loader, or loop over `run.eval_batches(loader)`",
        _whole_loaders, files="is_ported",
    ),
)  # fmt: skip
