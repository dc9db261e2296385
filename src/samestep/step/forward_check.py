"""Refuses a forward pass that changes parameters, or buffers that no checkpoint holds.

Each lane would then start from what the lanes before it on the same rank have made of them, and the
number of ranks would decide how often they change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import TaskError
from samestep.pytree import same_bits
from samestep.reduce.owners import is_held

_SHOWN = 3


class HiddenState:
    """Compares plain attributes of modules before and after a forward pass."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = [
            (f"{prefix}." if prefix else "", part) for module in modules for prefix, part in module.named_modules()
        ]
        self._before = self._values()

    def changed(self) -> str:
        """Return a warning that names what has changed since; empty if nothing has."""
        now = self._values()
        names = [name for name, value in self._before.items() if now.get(name, value) != value]
        if not names:
            return ""
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return (
            f"forward changes {', '.join(names[:_SHOWN])}{more}, which no checkpoint holds, and which lanes "
            "on other ranks do not see. If the loss depends on it, the run is not the same at another "
            "size or after a resume: samestep verify --resumed finds out. Use a buffer, batch.step, or "
            "the global generators"
        )

    def _values(self) -> dict[str, Any]:
        return {
            f"{prefix}{name}": _comparable(value)
            for prefix, part in self._modules
            for name, value in vars(part).items()
            if isinstance(value, (bool, int, float, Tensor, torch.Generator)) and name != "training"
        }


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, torch.Generator):
        return value.get_state().cpu().numpy().tobytes()
    # NaN is not equal to itself.
    return repr(value)


_FIRST_STEPS = 2
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ForwardCheck:
    """Compares parameters before and after lanes' forward passes, in some steps."""

    def __init__(
        self, modules: Sequence[nn.Module], every: int | None, warn: Callable[[str], None] = lambda line: None
    ) -> None:
        """Args:
        every: In which steps to look, besides the first ones; None for no others.
        """
        self._modules, self._warn = modules, warn
        self._hidden: HiddenState | None = None
        held = {
            name if number == 0 else f"module {number}.{name}": param
            for number, module in enumerate(modules)
            for name, param in module.named_parameters()
            if is_held(param)
        }
        self._names, self._params = list(held), list(held.values())
        self._every, self._steps = every, 0
        self.looks = self._counts_bits = False
        """Whether it looks into the lanes of this step."""
        self._hooks: list[Any] = []
        """On gradients as they come, in the first step: where they are added up, all are dense."""
        self._versions: list[int] = []
        self._sums: list[int] = []
        self._unsaved = [
            (f"{prefix}.{name}" if prefix else name, part, name)
            for module in modules
            for prefix, part in module.named_modules()
            for name in part._non_persistent_buffers_set
        ]
        self._unsaved_before: list[Tensor | None] = []

    def begin(self, step: int) -> None:
        """A new step."""
        first = self._steps < _FIRST_STEPS
        if self._steps == 0:
            named = zip(self._names, self._params, strict=True)
            trained = [(name, param) for name, param in named if param.requires_grad]
            self._hooks = [p.register_hook(partial(_refuse_sparse, name)) for name, p in trained]
        else:
            while self._hooks:
                self._hooks.pop().remove()
        self._steps += 1
        self.looks = first or bool(self._every and step % self._every == 0)
        # What is changed by way of `.data` has no new version: look at the bits of one lane.
        self._counts_bits = first

    def enter_lane(self) -> None:
        if self.looks:
            self._versions = [param._version for param in self._params]
            self._sums = _sums(self._params) if self._counts_bits else []
        if self._steps == 1 and self._counts_bits:
            self._hidden = HiddenState(self._modules)
        if self.looks and self._unsaved:
            buffers = [part._buffers.get(name) for _, part, name in self._unsaved]
            self._unsaved_before = [None if b is None else b.clone() for b in buffers]

    def leave_lane(self, lane: int) -> None:
        """After the lane's forward pass."""
        if not self.looks:
            return
        self._refuse_unsaved(lane)
        hidden, self._hidden = self._hidden, None
        if hidden is not None and (line := hidden.changed()):
            self._warn(line)
        moved = [v != p._version for v, p in zip(self._versions, self._params, strict=True)]
        if self._counts_bits and not any(moved):
            sums = zip(self._sums, _sums(self._params), strict=True)
            moved = [before != after for before, after in sums]
        self._counts_bits = False
        changed = [name for name, has_moved in zip(self._names, moved, strict=True) if has_moved]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise TaskError(
                f"the forward pass of lane {lane} changed the parameters {', '.join(changed[:3])}{more}. "
                "Every lane would change them again, and the number of ranks would decide how often. "
                "Change them after the update instead: in after_update(self, step) of the task, or "
                "behind optimizer.step() in your own loop"
            )

    def _refuse_unsaved(self, lane: int) -> None:
        for (path, part, name), before in zip(self._unsaved, self._unsaved_before, strict=True):
            now = part._buffers.get(name)
            # A cache that grows has another shape, or was not there.
            if before is None or now is None or now.shape != before.shape:
                continue
            if not same_bits(now, before):
                raise TaskError(
                    f"the forward pass of lane {lane} changed the buffer {path}, which is registered with "
                    "persistent=False: no checkpoint holds it, and lanes are not joined in it. Register "
                    "it without persistent=False"
                )


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a number for each tensor that another one with other bits hardly has; waits for the device."""
    found = [_sum(tensor.detach()) for tensor in tensors]
    return torch.stack(found).tolist() if found else []


def _refuse_sparse(name: str, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise TaskError(
            f"parameter {name} got a sparse gradient, but lanes are added up as dense ones: use sparse=False"
        )


def _sum(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.contiguous().view(_BITS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)
