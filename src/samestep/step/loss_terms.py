"""The result of a loss function: one loss, or several with names that are added up by weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from samestep.distributed.collectives import Collectives
from samestep.errors import StepError, TaskError
from samestep.step.lane_scope import Lanes

Term = tuple[Tensor, Tensor | float]
"""A loss summed over a lane's samples (tokens, pixels), and how many that were."""
LossValue = Tensor | Term | Mapping[str, Term]
"""A mean over the lane's samples, or a sum with its count, or several of these by name."""


class TermSums(NamedTuple):
    """The named losses of a step, summed over all lanes; on the device until they are read."""

    sums: Tensor
    names: tuple[str, ...]
    ratios: tuple[float, ...]
    """Of each loss's count to that of the first."""


class LossTerms(Protocol):
    """Turns the result of a loss function into one loss."""

    def combine(self, value: LossValue, samples: int) -> Term:
        """One loss, summed, and its count; a loss without one is the mean over so many samples."""

    def begin_step(self) -> None:
        """A new step."""

    def totals(self) -> TermSums | None:
        """Return the named losses, once the step's lanes are joined; None if they have no names."""


class OneLoss:
    """A loss without names, as it is."""

    def combine(self, value: LossValue, samples: int) -> Term:
        if isinstance(value, Tensor):
            return value * samples, samples
        if isinstance(value, Mapping):
            names = ", ".join(f"{name}: 1.0" for name in value)
            raise TaskError(f"the loss has names: set their weights in the config, as loss_weights: {{{names}}}")
        if not isinstance(value, tuple):
            raise StepError(f"the loss is a {type(value).__name__}: give the tensor itself, to be backpropagated")
        return value

    def begin_step(self) -> None:
        """Nothing to start over."""

    def totals(self) -> TermSums | None:
        return None


_ONE_PROPORTION = (
    "Losses are divided by one count after all lanes are added up: give them counts in one proportion, "
    "such as the number of samples"
)


class NamedLosses(nn.Module):
    """Losses with names, each a mean over its own count, added up by weights.

    Their sums over the lanes are a buffer, which travels with the other buffers. A lane is
    backpropagated once and divided by one count; so the counts must be in one proportion in every lane.
    """

    buffer_joins = {"sums": "sum"}  # noqa: RUF012 (as modules declare it)

    def __init__(self, weights: Mapping[str, float], device: torch.device, collectives: Collectives) -> None:
        super().__init__()
        self._collectives = collectives
        self._agreed = False
        self._weights = dict(weights)
        self._ratios: dict[str, float] = {}
        self.sums: Tensor
        zeros = torch.zeros(len(self._weights), dtype=torch.float64, device=device)
        self.register_buffer("sums", zeros)

    def combine(self, value: LossValue, samples: int) -> Term:
        if not isinstance(value, Mapping) or value.keys() != self._weights.keys():
            names = ", ".join(value) if isinstance(value, Mapping) else "one loss without a name"
            raise TaskError(
                f"loss_weights names {', '.join(self._weights)}, but the loss returned {names}: return "
                "a (sum, count) for each of these names"
            )
        first = next(iter(self._weights))
        count = value[first][1]
        parts = [self._scaled(name, *value[name], count) for name in self._weights]
        with torch.no_grad():
            self.sums += torch.stack([value[name][0].detach().double() for name in self._weights])
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total, count

    def _scaled(self, name: str, loss: Tensor, count: Tensor | float, whole: Tensor | float) -> Tensor:
        """Return a loss times its weight, for a division by `whole` in place of its own count."""
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise StepError(f"loss {name} must be a sum over the lane's samples: reduction='sum'")
        ratio: float | None = 1.0
        if isinstance(count, Tensor) or isinstance(whole, Tensor):
            if count is not whole:
                raise TaskError(
                    f"loss {name} has a count of its own as a tensor, which is not compared without "
                    "waiting for the device: give all losses the same count, or counts as numbers"
                )
        elif whole or count:
            ratio = count / whole if whole else math.inf
        else:
            ratio = self._ratios.get(name)  # a lane that counts nothing tells nothing
        if ratio is None:
            return loss * self._weights[name]
        known = self._ratios.setdefault(name, ratio)
        if not math.isclose(ratio, known, rel_tol=1e-9):
            raise TaskError(
                f"loss {name} counts {count} where the first loss counts {whole}; in other lanes that "
                f"was {known:g} for each. {_ONE_PROPORTION}"
            )
        return loss * (self._weights[name] / known)

    def begin_step(self) -> None:
        self.sums.zero_()

    def totals(self) -> TermSums:
        if not self._agreed:
            self._agree()
        names = tuple(self._weights)
        return TermSums(self.sums.clone(), names, tuple(self._ratios.get(n, 1.0) for n in names))

    def _agree(self) -> None:
        """With the first step: the proportions are the same on all ranks, and known to all of them."""
        self._agreed = True
        for theirs in self._collectives.gather(self._ratios):
            for name, ratio in theirs.items():
                known = self._ratios.setdefault(name, ratio)
                if not math.isclose(ratio, known, rel_tol=1e-9):
                    raise TaskError(
                        f"loss {name} counts {known:g} for each that the first loss counts, and {ratio:g} "
                        f"on another rank. {_ONE_PROPORTION}"
                    )


def check_loss(loss_sum: Tensor, count: Tensor | float) -> None:
    """Refuse a loss that is not a sum with its count."""
    if not isinstance(loss_sum, Tensor) or loss_sum.dim() != 0:
        shape = tuple(loss_sum.shape) if isinstance(loss_sum, Tensor) else type(loss_sum).__name__
        raise StepError(
            f"the loss of a lane must be a tensor of no dimensions, not {shape}: the mean over its samples, "
            "or their sum with its count"
        )
    if not loss_sum.requires_grad:
        raise StepError("the loss does not depend on any parameter that requires a gradient")
    if not isinstance(count, Tensor) and not count >= 0:
        raise StepError(f"count is {count}: it is how many things the loss was summed over")
    if isinstance(count, Tensor) and (count.dim() != 0 or count.requires_grad):
        raise StepError("count must be a number or a tensor of no dimensions without gradient")


def loss_value(
    loss: Tensor | Mapping[str, Term], count: Tensor | float | None, mean_over: Tensor | float | None
) -> LossValue:
    """Return what a loop's `backward` got as the engine takes it; see `Run.backward`."""
    if isinstance(loss, Mapping) or (count is None and mean_over is None):
        return loss
    if count is not None and mean_over is not None:
        raise StepError("backward got count and mean_over: a loss is a sum or a mean")
    if count is not None:
        return loss, count
    assert mean_over is not None
    return loss * mean_over, mean_over


def refuse_other_lanes(found: Sequence[Lanes], lanes: Lanes) -> None:
    """Refuse a loss of a loop's body that is not one of its lanes."""
    if not found:
        raise StepError(
            "run.backward got a loss that is no value of lanes: it does not follow from what the loader "
            "yields. A term that is the same for all lanes is added to the loss of the batch"
        )
    if any(those != lanes for those in found):
        raise StepError("run.backward got a loss with lanes of another step: backpropagate it in its own step")
