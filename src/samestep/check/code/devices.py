"""Rules about devices: code that means one GPU, the first GPU, or any GPU at all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from samestep.check.code.guards import names_a_rank, where_a_gpu_is
from samestep.check.code.rule import Rule, calls_of
from samestep.check.code.source import Code, constant, identifiers_in, keyword

_FIRST_GPU = re.compile(r"^cuda:\d+$")
_GLOBAL_RANK = re.compile(r"^(global_?|world_?)?rank(_id)?$", re.IGNORECASE)
_HARMLESS = frozenset(
    {"is_available", "device_count", "empty_cache", "is_initialized", "is_bf16_supported", "manual_seed",
     "manual_seed_all", "seed", "seed_all", "memory_allocated", "memory_reserved", "max_memory_allocated",
     "max_memory_reserved", "memory_cached", "max_memory_cached", "memory_stats", "is_tf32_supported",
     "get_arch_list", "get_rng_state_all", "amp", "set_device"}
)  # fmt: skip
"""What of torch.cuda works without a GPU, tried with torch 2.13; and what chooses one, which other rules look at."""


def _cuda_calls(code: Code) -> Iterator[ast.AST]:
    if _chooses_its_gpu(code):
        return
    for call in code.methods("cuda"):
        if not any(names_a_rank(argument) for argument in call.args):
            yield call


def _first_gpus(code: Code) -> Iterator[ast.AST]:
    for node in code.nodes:
        if isinstance(node, ast.Constant) and _is_first_gpu(code, node):
            yield node
    if not _chooses_its_gpu(code):
        yield from _unnumbered(code)
    for call in code.called("torch.cuda.set_device", "torch.accelerator.set_device_index"):
        if call.args and isinstance(constant(call.args[0]), int):
            yield call
    for call in code.called("torch.device"):
        if len(call.args) == 2 and constant(call.args[0]) == "cuda" and constant(call.args[1]) is not None:
            yield call
    for node in code.variables_set("CUDA_VISIBLE_DEVICES"):
        if not names_a_rank(node.value):
            yield node


def _is_first_gpu(code: Code, node: ast.Constant) -> bool:
    if not isinstance(node.value, str) or not _FIRST_GPU.match(node.value):
        return False
    holder = code.parents[node]
    # A comparison asks for it, and does not choose it; a text of its own is a docstring.
    return not isinstance(holder, (ast.Compare, ast.Expr, ast.JoinedStr))


def _unnumbered(code: Code) -> Iterator[ast.AST]:
    """`torch.device("cuda")` and the like, which is the current GPU: the first, unless one was set."""
    for call in [*code.called("torch.device"), *code.methods("to")]:
        if len(call.args) == 1 and _may_be_cuda(call.args[0]):
            yield call
    for call in code.calls:
        if _may_be_cuda(keyword(call, "device")):
            yield call
    for node in code.nodes:  # device = "cuda" if torch.cuda.is_available() else "cpu"
        if isinstance(node, ast.Assign) and _may_be_cuda(node.value):
            names = [code.name(target).lower() for target in node.targets]
            yield from [node] if any(name.endswith("device") for name in names) else []


def _may_be_cuda(node: ast.AST | None) -> bool:
    """`"cuda"`, or `"cuda" if torch.cuda.is_available() else "cpu"`."""
    if isinstance(node, ast.IfExp):
        return _may_be_cuda(node.body) or _may_be_cuda(node.orelse)
    return constant(node) == "cuda"


def _chooses_its_gpu(code: Code) -> bool:
    """Return whether it sets the current GPU to one that is not always the same."""
    setters = code.called("torch.cuda.set_device", "torch.accelerator.set_device_index")
    return any(call.args and constant(call.args[0]) is None for call in setters)


def _needs_gpu(code: Code) -> Iterator[ast.AST]:
    for call in code.calls:
        name = code.name(call.func)
        rest = name.removeprefix("torch.cuda.")
        if rest == name or rest.partition(".")[0] in _HARMLESS:
            continue
        if not where_a_gpu_is(code, call):
            yield call


def _by_global_rank(code: Code) -> Iterator[ast.AST]:
    # A function that is spawned gets its number on this machine.
    if any(True for _ in code.called("torch.multiprocessing.spawn")):
        return
    for call in code.calls:
        name, last = code.name(call.func), code.name(call.func).rpartition(".")[2]
        ids = keyword(call, "device_ids")
        chosen: list[ast.expr] = []
        if last in ("DistributedDataParallel", "DDP") and isinstance(ids, (ast.List, ast.Tuple)):
            chosen = ids.elts
        elif name == "torch.cuda.set_device" or (last in ("to", "cuda") and len(call.args) == 1):
            chosen = call.args[:1]
        elif name == "torch.device":
            chosen = [part for argument in call.args for part in _formatted(argument)]
            chosen += call.args[1:]
        if any(_is_global_rank(node) and not _is_local(code, node) for node in chosen):
            yield call


def _is_local(code: Code, node: ast.AST) -> bool:
    """Return whether a rank is the one on its machine, whatever it is called: `rank = int(os.environ["LOCAL_RANK"])`."""
    name = code.name(node)
    return any(
        isinstance(line, ast.Assign)
        and name in map(code.name, line.targets)
        and any(re.search("local|device_count", word, re.IGNORECASE) for word in identifiers_in(line.value))
        for line in code.nodes
    )


def _formatted(node: ast.AST) -> list[ast.expr]:
    """Return what an f-string fills in."""
    values = node.values if isinstance(node, ast.JoinedStr) else []
    return [part.value for part in values if isinstance(part, ast.FormattedValue)]


def _is_global_rank(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):  # rank % device_count
        return False
    words = list(identifiers_in(node))
    last = words[0] if isinstance(node, (ast.Attribute, ast.Name)) and words else ""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "get_rank"
    return bool(_GLOBAL_RANK.match(last))


RULES = (
    Rule(
        "cuda-call", "breaks", "`.cuda()`",
        "it moves to the current GPU, which is GPU 0 on every rank, and fails on machines without one",
        "nothing: `run.prepare(model, optimizer, loader)` moves the model and its batches; `.to(run.device)` for "
        "tensors that you make",
        _cuda_calls, files="uses_torch",
    ),
    Rule(
        "first-gpu", "breaks", "a fixed GPU",
        "all ranks of a machine would share this one GPU; without a number, `cuda` is GPU 0 on every rank too",
        "nothing: each rank gets its own GPU; `run.device` for tensors that you make",
        _first_gpus, files="uses_torch",
    ),
    Rule(
        "gpu-only", "breaks", "`torch.cuda` without a question for a GPU",
        "it raises on ranks without a GPU, such as CPU nodes and tests",
        'ask before: `if run.device.type == "cuda":`, or leave it out',
        _needs_gpu,
    ),
    Rule(
        "gpu-by-rank", "breaks", "a GPU by its global rank",
        "ranks count over all machines, GPUs on each: the second machine's first rank asks for a GPU that is not there",
        "nothing: samestep takes the local rank; `run.device`",
        _by_global_rank, files="uses_torch",
    ),
    Rule(
        "data-parallel", "differs", "`DataParallel`",
        "it drives several GPUs from one process, and cannot be one rank of several; BatchNorm sees a part of the batch",
        "nothing: `samestep launch script.py --nproc N` starts a rank for each GPU",
        calls_of("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"),
    ),
)  # fmt: skip
