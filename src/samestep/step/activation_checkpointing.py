"""Activations that are not kept for backward but computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.pytree import map_leaves
from samestep.reduce.buffer_slots import keep_buffers
from samestep.reduce.weight_units import matching_modules
from samestep.step.lane_scope import scope_of_body
from samestep.step.lane_tensor import LaneTensor, lane_tensor, lanes_of


def checkpoint_activations(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let these modules recompute their activations in backward; returns their names.

    Of nested modules only the outermost is changed.
    """
    chosen = matching_modules(model, patterns, "memory.checkpoint")
    for module in chosen.values():
        module.forward = partial(_computed_again, module, module.forward)
    return list(chosen)


def _computed_again(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module; what its backward pass needs is computed a second time."""
    scope = scope_of_body.get()
    # The RNG is put back for the second pass, so that dropout drops the same.
    again = partial(checkpoint, use_reentrant=False)
    if scope is None or not lanes_of((args, kwargs)):
        return again(forward, *args, context_fn=partial(_both_passes, module), **kwargs)
    passes = partial(_both_passes, module, scope.again())
    return _of_lanes(forward, partial(again, context_fn=passes), args, kwargs)


def _both_passes(
    module: nn.Module, in_body: Callable[[], AbstractContextManager[None]] = nullcontext
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _second_pass(module, in_body)


@contextmanager
def _second_pass(module: nn.Module, in_body: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    with in_body(), keep_buffers([module]):  # else BatchNorm's statistics would move twice
        yield


def _of_lanes(forward: Callable[..., Any], again: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module whose lanes run together: what is kept for its second pass are ordinary tensors."""
    returned: list[Any] = []

    def on_tensors(*values: Tensor) -> tuple[Tensor, ...]:
        own_args, own_kwargs = _filled((args, kwargs), values)
        result = forward(*own_args, **own_kwargs)
        if not returned:
            returned.append(map_leaves(_without_tensors, result))
        return tuple(_values(result))

    values = again(on_tensors, *_values((args, kwargs)))
    return _filled(returned[0], values)


def _values(data: Any) -> list[Tensor]:
    found = [leaf for leaf in lanes_of(data) if type(leaf) is LaneTensor]
    return [value for leaf in found for value in leaf.per_lane]


def _filled(data: Any, values: Sequence[Tensor]) -> Any:
    """Return the data with other tensors of lanes in place of its own."""
    rows = iter(values)

    def fill(leaf: Any) -> Any:
        if type(leaf) is not LaneTensor:
            return leaf
        return lane_tensor(leaf.lanes, [next(rows) for _ in leaf.lanes])

    return map_leaves(fill, data)


def _without_tensors(leaf: Any) -> Any:
    return lane_tensor(leaf.lanes, ()) if type(leaf) is LaneTensor else leaf
