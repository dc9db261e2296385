"""Who steps the optimizers of a run: its update, and nobody else while the run is open.

A loop that still calls `optimizer.step()` by itself would train each rank on its own, with gradients
that no other rank has seen, and nothing would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from samestep.errors import StepError


class OptimizerCalls:
    """Refuses steps of the run's optimizers outside of `ours`."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._is_ours = False
        self._hooks = [optimizer.register_step_pre_hook(self._check) for optimizer in optimizers]

    @contextmanager
    def ours(self) -> Iterator[None]:
        """While the run itself steps them."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def close(self) -> None:
        """The run is over: they are the loop's again."""
        while self._hooks:
            self._hooks.pop().remove()

    def is_own(self, hook: Any) -> bool:
        """Whether a hook of an optimizer is this one's, which draws no random numbers."""
        return getattr(hook, "__self__", None) is self

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours:
            raise StepError(
                f"{type(optimizer).__name__}.step() was called, but the run steps this optimizer: the "
                "gradients of other lanes and ranks would be missing. Loop over run.steps(loader), call "
                "step.backward(loss) for each batch of step.batches(), and step.update() in place of "
                "optimizer.step()"
            )
