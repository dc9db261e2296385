"""Finds a mean that was given as a sum, (mean, count), and a sum that was given as a mean.

The one is divided by the count a second time, the other not at all. Both train, slower or faster by the
size of a lane, and no number looks wrong. How a loss was reduced is in the
graph that autograd has recorded: its last operations are a mean, or a division by the count. So nothing
is computed again, random numbers and buffers stay as they are, and dropout makes no difference. What
the graph does not tell, such as a kernel of one's own, is taken for what it is said to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from samestep.step.loss_terms import LossTerms, LossValue, Term, TermSums

_MEAN, _SUM = 1, 2
"""What the losses of torch save as their reduction."""
_KEPT_BY = ("ToCopyBackward", "AliasBackward", "ViewBackward", "CloneBackward", "NegBackward")
"""Operations of one operand that leave a mean a mean; reshaping to no dimensions is a view."""
_DEEPEST = 32


class ReductionCheckedTerms:
    """A run's losses, the first of which is looked at."""

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
