"""Runs torch functions without a tensor of lanes in the body of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from samestep.step.lane_scope import LaneScope
from samestep.step.lane_tensor import LaneTensor, call_per_lane, lanes_of
from samestep.step.torch_functions import RANDOM, changes_first

_FACTORIES = frozenset(("rand", "randn", "randint", "randperm", "normal"))
"""Functions that draw tensors of given sizes: each lane gets its own."""
_INDEXING = frozenset(("__getitem__", "__setitem__", "index_put_", "index_put"))
_HARMLESS = ("zero_", "_foreach_zero_")
"""Changes of ordinary tensors that a loop makes between its forward and backward pass: of gradients."""
_SET_GRAD: Any = vars(torch._C.TensorBase)["grad"].__set__


class BodyMode(TorchFunctionMode):
    """While a body runs: what torch functions without a tensor of lanes do differently there."""

    def __init__(self, body: LaneScope, refuse: Callable[[Any, str, Any], None] | None = None) -> None:
        """Args:
        body: What is running.
        refuse: Raises for a function, with its name and arguments, that the body may not call.
        """
        super().__init__()
        self._body, self._refuse = body, refuse
        self._is_on = self._is_entered = False

    def turn_on(self) -> None:
        """Let it see the functions that are called from now on."""
        self._is_on = True
        if not self._is_entered:
            self._is_entered = True
            self.__enter__()  # type: ignore[no-untyped-call]

    def turn_off(self) -> None:
        """Let functions be as they are elsewhere."""
        self._is_on = False
        # Not where another mode was entered in the body, nor from inside this one, which torch has put away then.
        if self._is_entered and _get_current_function_mode() is self:
            self._is_entered = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_on:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if self._refuse is not None:
            self._refuse(func, name, (args, kwargs))
        if LaneTensor in types:
            return call_per_lane(func, args, kwargs)
        if name == "__get__":
            return func(*args, **kwargs)
        if name in _FACTORIES:
            return self._body.make(func, args, kwargs)
        if (name in _INDEXING or self._body.uneven) and lanes_of((args, kwargs)):
            return call_per_lane(func, args, kwargs)
        if self._body.is_put_off and _may_matter(func, name):
            self._body.run_now(name)
        if name in RANDOM and name != "random_" and kwargs.get("generator") is None:
            self._body.warn_of_one_draw(name)
        return func(*args, **kwargs)


def _may_matter(func: Any, name: str) -> bool:
    """Return whether a function of ordinary tensors changes what operations that were put off will read."""
    if name == "__set__":
        return bool(func != _SET_GRAD)
    return changes_first(name) and name not in _HARMLESS
