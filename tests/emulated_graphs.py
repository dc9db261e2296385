"""CUDA graphs on a CPU: a capture undoes what its body did, and a replay runs the body again.

For everything around a graph, in CI, which has no GPU: when a step is recorded, what is handed to it,
what it measures and in which order ranks talk. What only a GPU can get wrong (streams, memory that
kernels of one graph share) is for tests/gpu.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from samestep.optim import update
from samestep.reduce import stats, tree_sum
from samestep.reduce.bucket_stats import BucketStats
from samestep.reduce.stats import LocalStats
from samestep.reduce.tree_sum import TreeSum
from samestep.step import build_engine, graph_inputs, graphs, recorded_step


class Graph:
    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()


def _all_tensors() -> list[Tensor]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a tuple that another thread is making may have no reference but that thread's
    try:
        return [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    finally:
        sys.setswitchinterval(interval)


def capture(body: Callable[[], None], pool: Any = None, generators: Iterable[torch.Generator] = ()) -> Graph:
    tensors = _all_tensors()
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    states = [(generator, generator.get_state()) for generator in generators]
    body()
    with torch.no_grad():
        for tensor, values in before:
            if tensor.shape == values.shape:
                tensor.detach().copy_(values)
    for generator, state in states:
        generator.set_state(state)
    return Graph(body)


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    own = torch.default_generator
    home = own.get_state()
    own.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(own.get_state())
        own.set_state(home)


class _Stream:
    """Also an event: whatever it is asked, it is in order."""

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args: self


class _DefaultGenerator:
    """What a failed capture is undone with."""

    def clone_state(self) -> None:
        return None

    def initial_seed(self) -> int:
        return torch.default_generator.initial_seed()

    def graphsafe_set_state(self, state: None) -> None:
        assert state is None

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)


def _apply_update(self: recorded_step.RecordedStep, measured: LocalStats) -> None:
    gradients = self._engine.reduction.gradients
    if isinstance(gradients, TreeSum) and isinstance(gradients._bucket_stats, BucketStats):
        # A graph computes these stats where they were when it was captured.
        gradients._bucket_stats._stats = measured  # type: ignore[assignment]
    _REAL_APPLY_UPDATE(self, measured)


_REAL_APPLY_UPDATE = recorded_step.RecordedStep._apply_update


def _make_update(self: update.Update, *args: Any, **others: Any) -> None:
    _REAL_UPDATE(self, *args, **others)
    self._decided_on_device = all(map(update._reads_decision, self._optimizers))


_REAL_UPDATE = update.Update.__init__


@contextmanager
def emulated_graphs(why_no_update: str | None = None) -> Iterator[None]:
    """Let runs of this process take its CPU for a GPU, as far as graphs are concerned.

    Args:
        why_no_update: What keeps updates out of the graphs.
    """
    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", lambda *args: _Stream()),
        (torch.cuda, "Event", lambda *args: _Stream()),
        (torch.cuda, "stream", lambda stream: nullcontext()),
        (torch.cuda, "current_stream", lambda *args: _Stream()),
        (torch.cuda, "graph_pool_handle", lambda: None),
        (torch.cuda, "memory_allocated", lambda *args: 0),
        (torch.cuda, "memory_reserved", lambda *args: 0),
        (torch.cuda, "mem_get_info", lambda *args: (1 << 40, 1 << 40)),
        (torch.cuda, "default_generators", [_DefaultGenerator()]),
        # Fused optimizers of a CPU can be told on the device that a step is skipped, too.
        (update.Update, "__init__", _make_update),
        (update, "to_host", lambda values: (values.clone(), None)),
        (recorded_step.RecordedStep, "_apply_update", _apply_update),
        (recorded_step.RecordedStep, "_capturable", lambda self: nullcontext()),
        (recorded_step, "capture", capture),
        (recorded_step, "drawing_from", drawing_from),
        (recorded_step, "has_drawn", lambda generator: True),
        (graphs, "capture", capture),
        (graphs, "fresh_stream", _Stream),
        (graphs, "why_no_update", lambda optimizers: why_no_update),
        (graphs, "why_no_graph", lambda *args: None),
        (build_engine, "why_no_graph", lambda *args: None),
        (graph_inputs, "_STAGED", -1),
        (tree_sum, "BucketStats", lambda *args: BucketStats(*args[:-1], on_host=False)),
        # On a CPU numbers are read at once.
        (stats, "_numbers", lambda rows: list(rows.flatten().unbind())),
    ]
    with ExitStack() as stack:
        for owner, name, new in patches:
            stack.enter_context(mock.patch.object(owner, name, new))
        yield
