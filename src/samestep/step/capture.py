"""CUDA graphs of functions, and generators that their replays draw from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


def capture(
    body: Callable[[], None], pool: Any = None, generators: Iterable[torch.Generator] = ()
) -> torch.cuda.CUDAGraph:
    """Return a graph of everything that `body` launches; none of it is run.

    What `body` allocates and holds on to is there after each replay, but earlier kernels of the same
    graph may write to that memory first: what is to last from one replay to the next must be
    allocated outside.

    Args:
        body: Called once.
        pool: Memory that it shares with other graphs, which never run at the same time.
        generators: What replays draw from, besides the device's own.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    begins, works = _capture_stream(), _working_stream()
    with torch.cuda.graph(graph, pool=pool, stream=begins):
        works.wait_stream(begins)
        try:
            with torch.cuda.stream(works):
                body()
        finally:  # a capture that fails must leave no stream behind
            begins.wait_stream(works)
    return graph


def fresh_stream() -> torch.cuda.Stream:
    """Return a stream for what graphs compute, on which none is captured.

    When a graph goes, torch frees the memory that matrix products work in on the stream it was
    captured on, though other graphs hold its address (pytorch/pytorch#193402): their replays would
    write to memory of others. So our graphs begin on a stream on which nothing is computed. Streams
    come from a pool of torch's, which soon hands out the same ones again.
    """
    taken = [_capture_stream(), _default_capture_stream()]
    while (stream := torch.cuda.Stream()) in taken:
        pass
    return stream


@cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@cache
def _working_stream() -> torch.cuda.Stream:
    return fresh_stream()


def _default_capture_stream() -> torch.cuda.Stream | None:
    """Return the one that other people's graphs are captured on."""
    return torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let the device's own generator draw from this one's state, also in replays of what is captured."""
    own = torch.cuda.default_generators[generator.device.index or 0]
    home = own.graphsafe_get_state()
    own.graphsafe_set_state(generator.graphsafe_get_state())
    try:
        yield
    finally:
        own.graphsafe_set_state(home)


def has_drawn(generator: torch.Generator) -> bool:
    """Return whether something was drawn since the generator was seeded."""
    return generator.get_offset() > 0
