"""Rules about modules: what lanes cannot train, and forward passes that leave something behind."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from samestep.check.code.rule import Rule, calls_of
from samestep.check.code.source import Code, Function, constant, keyword

_BATCHNORM = tuple(f"torch.nn.BatchNorm{n}d" for n in (1, 2, 3))
_GROWS = frozenset({"append", "extend", "insert", "add", "update", "pop", "popleft", "appendleft"})


def _changed_in_forward(code: Code) -> Iterator[ast.AST]:
    for module in _modules(code):
        buffers = _buffers(code, module)
        for forward in _forwards(module):
            for node in ast.walk(forward):
                for target in _targets(node):
                    name = _own_attribute(target)
                    if name and name not in buffers and _carries_over(code, forward, node, name):
                        yield node
                if isinstance(node, ast.Call) and _grows_own_list(node, buffers):
                    yield node


def _weights_in_forward(code: Code) -> Iterator[ast.AST]:
    for module in _modules(code):
        for forward in _forwards(module):
            for node in ast.walk(forward):
                if any(_is_own_data(target) for target in _targets(node)):
                    yield node
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    in_place = node.func.attr.endswith("_") and not node.func.attr.endswith("__")
                    if in_place and _is_own_data(node.func.value):
                        yield node


def _modules(code: Code) -> Iterator[ast.ClassDef]:
    """Classes with a forward pass that are modules, by what they inherit in this file."""
    for one in code.classes:
        bases = [code.name(base).rpartition(".")[2] for base in one.bases]
        if any(base not in ("object", "Function", "") for base in bases) and list(_forwards(one)):
            yield one


def _forwards(module: ast.ClassDef) -> Iterator[Function]:
    for inner in module.body:
        if not isinstance(inner, ast.FunctionDef) or inner.name != "forward":
            continue
        # Those of an autograd function are static.
        if not any(getattr(mark, "id", "") == "staticmethod" for mark in inner.decorator_list):
            yield inner


def _buffers(code: Code, module: ast.ClassDef) -> set[str]:
    """Names of buffers that checkpoints hold: their changes are joined over lanes."""
    return {
        str(constant(call.args[0]))
        for call in ast.walk(module)
        if isinstance(call, ast.Call) and call.args
        if isinstance(call.func, ast.Attribute) and call.func.attr == "register_buffer"
        if constant(keyword(call, "persistent")) is not False
    }


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        found = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        found = [node.target]
    else:
        return []
    return [part for target in found for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def _own_attribute(node: ast.AST) -> str:
    """`x` of `self.x` and `self.x[...]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return node.attr
    return ""


def _is_own_data(node: ast.AST) -> bool:
    """`self.weight.data`, `self.layer.weight.data[...]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if not (isinstance(node, ast.Attribute) and node.attr == "data"):
        return False
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _carries_over(code: Code, forward: Function, node: ast.AST, name: str) -> bool:
    """Return whether a pass sees what the one before it has left: it is read before it is set."""
    if isinstance(node, ast.AugAssign):
        return True
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None:
        return False  # forgets what was there
    if any(isinstance(o, ast.If) and _reads(o.test, name) for o in code.around(node)):
        return False  # a cache that is filled when it is needed
    end = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
    inside = set(ast.walk(node))
    return any(
        (read.lineno, read.col_offset) < end or read in inside
        for read in ast.walk(forward)
        if isinstance(read, ast.Attribute) and isinstance(read.ctx, ast.Load) and _own_attribute(read) == name
        if not _is_stored_into(code, read)
    )


def _is_stored_into(code: Code, read: ast.AST) -> bool:
    """`self.x` of `self.x[0] = ...` is loaded, but not read."""
    holder = code.parents[read]
    return isinstance(holder, ast.Subscript) and isinstance(holder.ctx, ast.Store)


def _reads(test: ast.AST, name: str) -> bool:
    texts = (constant(node) for node in ast.walk(test))  # hasattr(self, "cache")
    return name in texts or any(_own_attribute(node) == name for node in ast.walk(test))


def _grows_own_list(call: ast.Call, buffers: set[str]) -> bool:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in _GROWS):
        return False
    name = _own_attribute(call.func.value)
    return bool(name) and name not in buffers and isinstance(call.func.value, ast.Attribute)


def _batchnorm(code: Code) -> Iterator[ast.AST]:
    """Return the first of a file: the others need the same answer."""
    return iter(list(code.called(*_BATCHNORM))[:1])


def _lazy(code: Code) -> Iterator[ast.AST]:
    return (call for call in code.calls if code.name(call.func).startswith("torch.nn.Lazy"))


def _sparse(code: Code) -> Iterator[ast.AST]:
    for call in code.called("torch.nn.Embedding", "torch.nn.EmbeddingBag"):
        if constant(keyword(call, "sparse")) is True:
            yield call


RULES = (
    Rule(
        "forward-state", "differs", "an attribute that the forward pass changes",
        "each rank has its own, which sees only this rank's samples, and no checkpoint holds it: what depends on it is "
        "another run at another size, or after a resume",
        "a buffer (`self.register_buffer`), whose changes are joined over lanes and saved; or `batch.step` for a count of steps",
        _changed_in_forward, files="uses_torch",
    ),
    Rule(
        "forward-weights", "breaks", "a forward pass that writes weights",
        "every pass changes them again, and the number of ranks decides how often: samestep refuses it",
        "change them after the update: `after_update(self, step)` of a task, or behind `optimizer.step()` in a loop",
        _weights_in_forward, files="uses_torch",
    ),
    Rule(
        "batchnorm", "differs", "BatchNorm",
        "it normalises over the samples that one pass has: fewer of them on each rank, or in each lane; over one alone it fails",
        "fewer and larger lanes, `batchnorm: global`, or GroupNorm",
        _batchnorm, plain=True,
    ),
    Rule(
        "sync-batchnorm", "breaks", "SyncBatchNorm",
        "it normalises over ranks, so that their number changes the run, and does not run on CPUs: refused with `same: bits`",
        "BatchNorm, which normalises over a lane, or `batchnorm: global`; `distributed.sync_batchnorm` with `same: samples`",
        calls_of("torch.nn.SyncBatchNorm", "torch.nn.SyncBatchNorm.convert_sync_batchnorm"),
    ),
    Rule(
        "lazy-module", "breaks", "a lazy module",
        "its shapes are not known before a batch was seen, and all ranks must start from the same weights: samestep refuses it",
        "give its shapes, or put a batch through the model before `run.prepare`",
        _lazy,
    ),
    Rule(
        "sparse-gradient", "breaks", "an embedding with sparse gradients",
        "lanes are added up as dense gradients: samestep refuses it",
        "`sparse=False`",
        _sparse,
    ),
    Rule(
        "lbfgs", "breaks", "LBFGS",
        "it evaluates the loss several times in a step, and a step of lanes gives it one gradient: samestep refuses it",
        "an optimizer that needs one gradient, such as AdamW",
        calls_of("torch.optim.LBFGS"),
    ),
)  # fmt: skip
