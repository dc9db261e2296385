"""A rise of the learning rate over the first steps, under any other schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Warmup(LRScheduler):
    """Raises an optimizer's rates from near 0 to their full height in `length` steps.

    Step n, counted from 0, has (n + 1) / (length + 1) of the full rate.
    """

    def __init__(self, optimizer: Optimizer, length: int) -> None:
        self.optimizer = optimizer
        self.length = length
        self._done = 0
        self._full = _rates(optimizer)
        self._apply()

    @property
    def is_over(self) -> bool:
        return self._done >= self.length

    def step(self, epoch: int | None = None) -> None:
        if not self.is_over:
            self._done += 1
            self._apply()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The full rates inside; what they are in the end is what the rise goes to."""
        _set_rates(self.optimizer, self._full)
        yield
        self._full = _rates(self.optimizer)
        self._apply()

    def _apply(self) -> None:
        share = (self._done + 1) / (self.length + 1) if not self.is_over else 1.0
        _set_rates(self.optimizer, [share * rate for rate in self._full])

    def get_last_lr(self) -> list[float | Tensor]:
        return [*_rates(self.optimizer)]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done, "full": list(self._full)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._done, self._full = state_dict["done"], list(state_dict["full"])


class Warmed(LRScheduler):
    """Another scheduler, whose rates a warm-up lowers; one that `waits` begins after it."""

    def __init__(self, inner: LRScheduler, warmup: Warmup, waits: bool) -> None:
        self.optimizer = inner.optimizer
        self._inner, self._warmup, self._waits = inner, warmup, waits

    def step(self, *values: Any) -> None:
        """Move on; the values are the inner scheduler's."""
        if self._warmup.is_over:
            self._inner.step(*values)
        elif not self._waits:
            with self._warmup.set_aside():
                self._inner.step(*values)

    def get_last_lr(self) -> list[float | Tensor]:
        return [*_rates(self.optimizer)]

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def _set_rates(optimizer: Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # a CUDA graph reads it where it is
        else:
            group["lr"] = rate
