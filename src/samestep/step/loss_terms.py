"""The result of a loss function: one loss, or several with names that are added up by weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

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
    """Ratios of each loss's count to that of the first."""


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
        """Check with the first step that the proportions are the same on all ranks, and known to all of them."""
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


_MEAN, _SUM = 1, 2
"""What the losses of torch save as their reduction."""
_KEPT_BY = ("ToCopyBackward", "AliasBackward", "ViewBackward", "CloneBackward", "NegBackward")
"""Operations of one operand that leave a mean a mean; reshaping to no dimensions is a view."""
_DEEPEST = 32


class ReductionCheckedTerms:
    """A run's losses, the first of which is looked at: a mean given as a sum, (mean, count), or a sum given as a mean.

    The one is divided by the count a second time, the other not at all. Both train, slower or faster by the size of
    a lane, and no number looks wrong. How a loss was reduced is in the graph that autograd has recorded: its last
    operations are a mean, or a division by the count. So nothing is computed again, random numbers and buffers stay
    as they are, and dropout makes no difference. What the graph does not tell, such as a kernel of one's own, is
    taken for what it is said to be.
    """

    def __init__(self, terms: LossTerms, warn: Callable[[str], None]) -> None:
        self._terms, self._warn = terms, warn
        self.begin_step, self.totals = terms.begin_step, terms.totals
        self.combine = self._combine_first

    begin_step: Callable[[], None]
    totals: Callable[[], TermSums | None]
    combine: Callable[[LossValue, int], Term]

    def _combine_first(self, value: LossValue, samples: int) -> Term:
        combined = self._terms.combine(value, samples)
        self.combine = self._terms.combine  # every lane of every step comes by here
        line = warning_about(value, samples)
        if line:
            self._warn(line)
        return combined


def warning_about(value: LossValue, samples: int) -> str:
    """Return what is wrong with the loss of a lane of so many samples; empty if nothing is."""
    named = value if isinstance(value, Mapping) else {"": value}
    for name, term in named.items():
        if not isinstance(term, tuple):
            if samples > 1 and is_sum(term):
                return (
                    f"the loss is taken for a mean over the lane's {samples} samples, but it is a sum: its "
                    "gradients are larger by the size of a lane, and so is the loss that is logged. Use "
                    "reduction='mean', or say so: run.backward(loss, reduction='sum'), or in a function the sum and its count"
                )
            continue  # a mean, and said to be one
        loss, count = term[0], _number(term[1])
        if count is None or count <= 1 or not is_mean(loss, count):
            continue
        what = f"loss {name}" if name else "the loss"
        return (
            f"{what} was given as a sum over {count:g}, but it is a mean already. It is divided by the count of "
            f"all lanes once more, so gradients are about {count:g} times too small, and so is the loss that "
            "is logged. Use reduction='sum'; or leave the count out, for a mean over the lane's samples: "
            "run.backward(loss), or only the loss returned; or run.backward(loss, mean_over=count)"
        )
    return ""


def is_mean(loss: Any, count: float) -> bool:
    """Return whether a loss was divided by how many things it was summed over, as its graph shows."""
    node = loss.grad_fn if isinstance(loss, Tensor) else None
    return node is not None and _ends_in_mean(node, count, _DEEPEST)


def is_sum(loss: Any) -> bool:
    """Return whether the last thing that was done to a loss, as its graph shows, is to add it up."""
    node = loss.grad_fn if isinstance(loss, Tensor) else None
    while node is not None and node.name().startswith(_KEPT_BY):
        node = node.next_functions[0][0]
    if node is None:
        return False
    return node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", None) == _SUM


def _ends_in_mean(node: Any, count: float, deepest: int) -> bool:
    name = node.name()
    if name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN:
        return True
    if not deepest:
        return False
    inputs = [before for before, _ in node.next_functions if before is not None]
    factor = None
    if name.startswith(("DivBackward", "MulBackward")):
        factor = _number(getattr(node, "_saved_other", None))
    if name.startswith("DivBackward") and factor is not None:
        # A division by 2 may be the half of a square.
        if count > 2 and math.isclose(factor, count, rel_tol=1e-6):
            return True
        keeps = abs(factor) >= 1  # as for an accumulation over steps
    elif name.startswith("MulBackward") and factor is not None:
        keeps = abs(factor) <= 1  # a weight; a larger factor may make it a sum again
    else:
        keeps = name.startswith((*_KEPT_BY, "AddBackward", "SubBackward"))
    return keeps and bool(inputs) and all(_ends_in_mean(n, count, deepest - 1) for n in inputs)


def _number(value: Any) -> float | None:
    """Return a number, where it can be read now."""
    if not isinstance(value, Tensor):
        return float(value) if isinstance(value, int | float) else None
    capturing = value.is_cuda and torch.cuda.is_current_stream_capturing()
    return None if capturing or value.numel() != 1 else float(value)
