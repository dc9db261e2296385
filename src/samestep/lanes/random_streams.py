"""The RNG streams of a run: functions of the seed, the step and the lane, never of a rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

MODEL = "model"
"""Draws inside a lane's forward pass: dropout and the like."""
DATA = "data"
"""Draws while a lane's batch is read: augmentation."""
BETWEEN = "between"
"""Draws outside any lane; the same on every rank."""
EPOCH = "epoch"
"""Draws at the top of an epoch, before its first step; the same on every rank."""
WHOLE_BATCH = "whole batch"
"""Draws in a loss over the whole global batch; the same on every rank."""
UPDATE = "update"
"""Draws while the weights are changed, such as an optimizer's noise; the same on every rank."""
HOOKS = "hooks"
"""Draws of those who follow the run; the same on every rank."""
INIT = "init"
"""Draws before the first step: the initial weights."""
ORDER = "order"
"""The order of samples in an epoch."""
METRICS = "metrics"
"""Draws while an evaluation's metrics are made and computed; the same on every rank."""


@lru_cache(maxsize=1 << 16)
def derive(seed: int, *key: str | int) -> int:
    """Return the 64-bit root of a stream: stable over processes, machines and versions."""
    text = "/".join(map(str, (seed, *key)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


_STRIDE, _SECOND_STRIDE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
"""Odd, so that no two positions below 2^32 share the low half, which is all that some use."""


def seed_at(root: int, first: int = 0, second: int = 0) -> int:
    """Return the seed at one position of a stream, such as a step. Cheaper than deriving another root."""
    return (root + first * _STRIDE + second * _SECOND_STRIDE) & 0xFFFFFFFFFFFFFFFF


def order_rng(seed: int, epoch: int) -> np.random.RandomState:
    """Return the generator of an epoch's order. RandomState's streams are frozen by NumPy's policy."""
    root = derive(seed, ORDER, epoch)
    return np.random.RandomState([root & 0xFFFFFFFF, root >> 32])


_python: Any = random.seed.__self__  # type: ignore[attr-defined]
"""The generator behind the functions of `random`."""
_seed_python = super(random.Random, _python).seed


def _seed_host(seed: int) -> None:
    _seed_python(seed)
    _python.gauss_next = None
    np.random.seed(seed & 0xFFFFFFFF)


def reseed(seed: int, generators: Sequence[torch.Generator] = ()) -> None:
    """Seed python, numpy and torch for one stream.

    `torch.manual_seed` visits every kind of device and costs 0.2 ms; this costs 0.01 ms. Every lane
    of every step comes by here: `random.seed` is left out with its checks of what a seed is.
    """
    _seed_host(seed)
    torch.default_generator.manual_seed(seed)
    for generator in generators:
        generator.manual_seed(seed)


class RngStreams:
    """Puts this process's generators at the start of a stream of random numbers."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device_generators: list[torch.Generator] = []
        if device.type == "cuda":
            torch.cuda.init()
            self._device_generators.append(torch.cuda.default_generators[device.index or 0])
        self._torch_generators = [torch.default_generator, *self._device_generators]

    def enter(self, *key: str | int, at: tuple[int, ...] = (), torch_only: bool = False) -> None:
        """Go to a position of the stream that `key` names.

        Args:
            *key: Which stream.
            at: Its position.
            torch_only: Whether Python's and NumPy's generators stay where they are.
        """
        seed = seed_at(derive(self._seed, *key), *at)
        if not torch_only:
            reseed(seed, self._device_generators)
            return
        for generator in self._torch_generators:
            generator.manual_seed(seed)

    def enter_host(self, *key: str | int, at: tuple[int, ...] = ()) -> None:
        """Go to a position of the stream by Python's and NumPy's generators; torch's stay where they are."""
        _seed_host(seed_at(derive(self._seed, *key), *at))

    @contextmanager
    def kept(self, torch_only: bool = False) -> Iterator[None]:
        """Leave the generators where they were; with `torch_only`, torch's."""
        states = self.torch_states()
        others = None if torch_only else (random.getstate(), np.random.get_state())
        try:
            yield
        finally:
            self.put_torch_states(states)
            if others is not None:
                random.setstate(others[0])
                np.random.set_state(others[1])

    def torch_states(self) -> list[torch.Tensor]:
        """Return the states of torch's generators."""
        return [generator.get_state() for generator in self._torch_generators]

    def put_torch_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set torch's generators to these states."""
        for generator, state in zip(self._torch_generators, states, strict=True):
            generator.set_state(state)
