"""Calls of a run's modules with tensors of lanes, which then run once per lane.

A module's call goes by way of `_compiled_call_impl`, torch's own place for another way to call a module: copies and
pickles of the module do not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function

from samestep.step.lane_tensor import each_lane, lanes_of

_PLACE = "_compiled_call_impl"

PerLane = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
"""Gets a module, its own call, and arguments with values of lanes; returns what the lanes returned."""


class ModuleCalls:
    """Hands calls with tensors of lanes to the body of a loop."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.per_lane: PerLane | None = None
        """What runs them; None outside of a body, and inside of a lane."""
        self.is_updated = True
        """Whether an update has come since the last backward pass."""
        self._installed: list[tuple[nn.Module, Any]] = []
        for module in modules:
            self._install(module)

    def _install(self, module: nn.Module) -> None:
        if any(module is known for known, _ in self._installed):
            return
        before = module.__dict__.get(_PLACE)
        own = module._call_impl if before is None else before
        self._installed.append((module, before))
        module.__dict__[_PLACE] = partial(self._call, module, own)
        if not isinstance(module, (torch._dynamo.OptimizedModule, torch.jit.ScriptModule)):
            for child in module.children():
                self._install(child)

    def _call(self, module: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        per_lane = self.per_lane
        if per_lane is None or not lanes_of((args, kwargs)):
            return own(*args, **kwargs)
        return per_lane(module, own, args, kwargs)

    def close(self) -> None:
        """Leave the modules as they were."""
        while self._installed:
            module, before = self._installed.pop()
            if before is None:
                module.__dict__.pop(_PLACE, None)
            else:
                module.__dict__[_PLACE] = before


@contextmanager
def functions_per_lane() -> Iterator[None]:
    """While entered, an `autograd.Function` that gets tensors of lanes is applied once per lane.

    Its `apply` is no torch function: it would take a tensor of lanes for an ordinary one, and lose its graph.
    """
    own = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = own.__get__(None, cls)
        if not lanes_of((args, kwargs)):
            return bound(*args, **kwargs)
        return each_lane(bound, args, kwargs)

    Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Function.apply = own  # type: ignore[method-assign]
