"""What a loop over the loader must leave alone between the passes of a step, and how that is seen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import StepError


class BackwardPasses:
    """Counts how often gradients of some parameters were computed."""

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._count = self._expected = 0
        self._hooks = [param.register_post_accumulate_grad_hook(self._counted) for param in params]

    def _counted(self, _: Tensor) -> None:
        self._count += 1

    def expect(self) -> None:
        """All passes up to now were the run's."""
        self._expected = self._count

    def refuse_others(self) -> None:
        """Raise if there was a pass that was not the run's."""
        if self._count != self._expected:
            raise StepError(
                "loss.backward() was called besides run.backward(loss): no other rank sees those gradients. Add "
                "the losses up, and give run.backward the sum"
            )

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


class Tensors:
    """Some tensors as they are now."""

    def __init__(self, tensors: Sequence[Tensor], by_value: bool = False) -> None:
        """Args:
        tensors: Which.
        by_value: Whether they are copied, to see changes that torch does not count.
        """
        self._tensors = list(tensors)
        self._versions = [tensor._version for tensor in self._tensors]
        self._values = [tensor.detach().clone() for tensor in self._tensors] if by_value else []

    @property
    def have_changed(self) -> bool:
        """Whether one of them has been written to since."""
        if any(t._version != v for t, v in zip(self._tensors, self._versions, strict=True)):
            return True
        return any(
            not torch.equal(tensor, value)
            for tensor, value in zip(self._tensors, self._values, strict=False)
        )
