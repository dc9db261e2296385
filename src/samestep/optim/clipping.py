"""Limits on the gradient: by norm, by value, or by a multiple of its usual norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_value_, get_total_norm

from samestep.config.optim import ClipConfig
from samestep.errors import CheckpointError


class Clipping:
    """Clips the summed gradients, all at once or each group by itself; never waits for a GPU."""

    def __init__(
        self,
        rules: ClipConfig,
        groups: Sequence[Sequence[Parameter]],
        device: torch.device,
        own: Sequence[tuple[Sequence[Parameter], float | None]] = (),
        norm: Callable[[Sequence[Parameter]], Tensor] | None = None,
    ) -> None:
        """Args:
        own: Groups with a largest norm of their own; None for no limit.
        norm: Returns the norm of the gradients of parameters where this rank has not all of them.
        """
        self._rules = rules
        self._own = [(_Group(params, norm), limit) for params, limit in own if limit is not None]
        # A parameter of two optimizers has one gradient.
        everything = list({id(param): param for group in groups for param in group}.values())
        together = [everything] if everything else []
        self._groups = [_Group(group, norm) for group in (groups if rules.per_group else together)]
        self._usual = torch.zeros(len(self._groups), device=device)
        """Each group's running norm; 0 before the first step."""

    @property
    def remembers(self) -> bool:
        """Return whether it has a state that belongs to the run."""
        return self._rules.adaptive is not None

    def apply(self, found: Tensor | None = None) -> Tensor | None:
        """Clip; returns the norms before it, one or one per group.

        `found` is 1 in a step that will not count: it must not move the running norm.
        """
        for group, limit in self._own:
            grads = group.grads()
            group.limit(grads, group.norm(grads), limit)
        if not self._rules.is_on or not self._groups:
            return None
        if not self._rules.per_group and self._rules.norm is not None:
            group = self._groups[0]
            grads = group.grads()
            norm = group.norm(grads)
            group.limit(grads, norm, self._rules.norm)
            return norm
        # Without gradients torch returns a 0 on the host.
        each = [group.norm(group.grads()).to(self._usual.device) for group in self._groups]
        norms = torch.stack(each)
        if self._rules.value is not None:
            for group in self._groups:
                clip_grad_value_(group.params, self._rules.value)
        elif self._rules.norm is not None:
            for group, norm in zip(self._groups, norms, strict=True):
                group.limit(group.grads(), norm, self._rules.norm)
        else:
            self._clip_adaptively(norms, found)
        return norms if self._rules.per_group else norms[0]

    def _clip_adaptively(self, norms: Tensor, found: Tensor | None) -> None:
        assert self._rules.adaptive is not None, "the only one left"
        norms, known = norms.to(self._usual.dtype), self._usual > 0
        limits = torch.where(known, self._rules.adaptive * self._usual, torch.inf)
        for group, excess in zip(self._groups, norms / limits, strict=True):
            group.limit(group.grads(), excess, 1.0)
        clipped = torch.minimum(norms, limits)
        moved = torch.where(known, torch.lerp(clipped, self._usual, self._rules.memory), clipped)
        counts = norms.isfinite()
        if found is not None:
            counts = counts & (found == 0)
        self._usual.copy_(torch.where(counts, moved, self._usual))

    def state_dict(self) -> dict[str, Any]:
        return {"usual norms": self._usual}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        norms = state["usual norms"]
        if norms.shape != self._usual.shape:
            raise CheckpointError(
                f"clip.adaptive remembers {norms.numel()} norms, and {self._usual.numel()} are "
                "clipped now: leave clip.per_group and the parameter groups as they were"
            )
        self._usual.copy_(norms)


class _Group:
    """Parameters that are clipped by one norm.

    As torch.nn.utils.clip_grad_norm_ to the bit. That sorts the gradients by kind, twice, which
    takes longer than the kernels where all are of one.
    """

    def __init__(self, params: Sequence[Parameter], norm: Callable[[Sequence[Parameter]], Tensor] | None) -> None:
        self.params = list(params)
        self._norm = norm
        self._of_one_kind = len({(param.dtype, param.device) for param in self.params}) == 1

    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]

    def norm(self, grads: list[Tensor]) -> Tensor:
        if self._norm is not None:
            return self._norm(self.params)
        if not self._of_one_kind or not grads:
            return get_total_norm(grads)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)), 2.0)
        return norm

    def limit(self, grads: list[Tensor], norm: Tensor, limit: float) -> None:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        if self._of_one_kind and grads:
            torch._foreach_mul_(grads, factor)
            return
        for grad in grads:
            grad.mul_(factor.to(grad.device))
