"""Decides who calls `step` of optimizers and schedulers: the run or the loop, never both.

A scheduler that both move on runs twice as fast, and nothing shows it but the curve. Its class is
replaced by one of the same name, since an attribute on the object would be in its `state_dict`. A loop that still
calls `optimizer.step()` would train each rank on its own, with gradients that no other rank has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import StepError

_KIND = "_samestep_kind"


def refuse_own_steps(scheduler: LRScheduler, every: str) -> None:
    """Refuse calls of its `step` other than by `move`."""

    def refuse() -> None:
        raise StepError(
            f"{type(scheduler).__name__}.step() was called, but the run moves this scheduler on with every "
            f"{every}: remove the call, or give run.prepare the scheduler itself in place of a samestep.Schedule"
        )

    call_before_steps(scheduler, refuse)


def call_before_steps(scheduler: LRScheduler, before_move: Callable[[], None]) -> None:
    """Call a function before each call of its `step`."""
    kind: Any = type(scheduler)

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        before_move()
        kind.step(self, *args, **kwargs)

    members = {"step": step, _KIND: kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    scheduler.__class__ = type(kind.__name__, (kind,), members)


def move(scheduler: LRScheduler) -> None:
    """Move a scheduler on, whoever else must not."""
    getattr(type(scheduler), _KIND, type(scheduler)).step(scheduler)


def _refuse_group(optimizer: Optimizer) -> Callable[[Any], None]:
    def add_param_group(param_group: Any) -> None:
        raise StepError(
            f"{type(optimizer).__name__}.add_param_group was called after run.prepare, which has taken in the "
            "parameters of this optimizer: no rank would know the others' gradients of new ones. Add them "
            "before run.prepare, with a learning rate of 0 until they are to train"
        )

    return add_param_group


def _inside(own: Callable[..., None], around: Callable[[], AbstractContextManager[None]]) -> Any:
    @wraps(own)
    def inside(*args: Any, **kwargs: Any) -> None:
        with around():
            own(*args, **kwargs)

    return inside


class StepGuard:
    """Refuses steps of the run's optimizers outside of `ours`."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._is_ours = False
        self._optimizers = optimizers
        self._hooks = [optimizer.register_step_pre_hook(self._check) for optimizer in optimizers]
        self._replaced: dict[Optimizer, Any] = {}
        for optimizer in optimizers:
            optimizer.add_param_group = _refuse_group(optimizer)  # type: ignore[method-assign,assignment]

    @contextmanager
    def ours(self) -> Iterator[None]:
        """While the run itself steps them."""
        self._is_ours = True
        try:
            yield
        finally:
            self._is_ours = False

    def answer(
        self, instead: Callable[[Optimizer], None], around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Let the loop's own calls of `step` do this from now on."""
        for optimizer in self._optimizers if not self._replaced else ():
            self._replaced[optimizer] = optimizer.step
            optimizer.step = self._answered(optimizer, instead)  # type: ignore[method-assign]
            optimizer.zero_grad = _inside(optimizer.zero_grad, around)  # type: ignore[method-assign]

    def _answered(self, optimizer: Optimizer, instead: Callable[[Optimizer], None]) -> Any:
        own = optimizer.step

        @wraps(own)  # with the mark by which schedulers know that they follow its steps
        def step(closure: Any = None) -> Any:
            if self._is_ours:
                return own() if closure is None else own(closure)
            if closure is not None:
                raise StepError(
                    f"{type(optimizer).__name__}.step got a closure, which would run the model again: the run "
                    "takes optimizers that step once"
                )
            instead(optimizer)
            return None

        return step

    def close(self) -> None:
        """The run is over: they are the loop's again."""
        while self._replaced:
            optimizer, own = self._replaced.popitem()
            optimizer.step = own  # type: ignore[method-assign]
            optimizer.__dict__.pop("zero_grad", None)
        while self._hooks:
            self._hooks.pop().remove()
        for optimizer in self._optimizers:
            optimizer.__dict__.pop("add_param_group", None)

    def is_own(self, hook: Any) -> bool:
        """Return whether a hook of an optimizer is this one's, which draws no random numbers."""
        return getattr(hook, "__self__", None) is self

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours:
            raise StepError(
                f"{type(optimizer).__name__}.step() was called, but the run steps this optimizer: the "
                "gradients of other lanes and ranks would be missing. Loop over the loader that run.prepare "
                "returned; inside run.steps(loader), step.train(function) steps it"
            )
