"""What a decomposition is trained by: importances that are small, components that add up, and outputs that stay.

Each loss is a sum with the count that it is a mean over; masks are drawn from the lane's random numbers, and so the same on
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-12
"""Keeps powers below 1 of an importance of 0 finite."""


@dataclass(frozen=True)
class Masks:
    """How one layer is computed in a pass."""

    mask: Tensor
    """Of each component, (..., count)."""
    delta: Tensor | None = None
    """Of what the components leave over, (...); without it that is left out."""
    routed: Tensor | None = None
    """Where components replace the layer, (...); everywhere if None."""


LayerMasks = Mapping[str, Masks]
Importances = Mapping[str, Tensor]
"""Of each layer, (..., count)."""
Reconstruct = Callable[[LayerMasks], Tensor]
"""The error of the output, summed, with these layers replaced."""


def annealed(start: float, end: float, progress: float) -> float:
    """Return the power of the minimality loss: on a line from start to end over the run."""
    return start + (end - start) * min(max(progress, 0.0), 1.0)


def minimality(importances: Importances, power: float, beta: float, lanes: int) -> Tensor:
    """Return the sum of all importances to a power; with beta, more for components that many positions use.

    Args:
        importances: by the sigmoid that leaks above.
        power: 1 counts how much, less than 1 more and more how many.
        beta: how much more. How many positions of the global batch use a component is estimated from one lane.
        lanes: of the global batch.
    """
    totals = []
    for values in importances.values():
        sums = (values + EPSILON).pow(power).flatten(0, -2).sum(0)
        found = sums.sum()
        if beta:
            found = found + beta * (sums * torch.log2(1 + sums * lanes)).sum()
        totals.append(found)
    return torch.stack(totals).sum()


def output_error(kind: Literal["mse", "kl"], found: Tensor, target: Tensor) -> Tensor:
    """Return the summed squared error; or KL(target || found) of logits, summed over positions."""
    if kind == "mse":
        return F.mse_loss(found, target, reduction="sum")
    return F.kl_div(found.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="sum")


def stochastic_masks(importances: Importances, delta: bool) -> dict[str, Masks]:
    """Masks between the importance and 1: what is not needed may be there, or not."""
    made = {}
    for name, needed in importances.items():
        mask = needed + (1 - needed) * torch.rand_like(needed)
        over = torch.rand(needed.shape[:-1], device=needed.device) if delta else None
        made[name] = Masks(mask, over)
    return made


def importance_masks(importances: Importances) -> dict[str, Masks]:
    """Masks that are the importances: nothing that is not needed is there."""
    return {name: Masks(needed) for name, needed in importances.items()}


def routed_to_some(masks: LayerMasks) -> dict[str, Masks]:
    """Return the same masks, at each position for so many random layers: a number drawn from 1 to all."""
    names = list(masks)
    first = masks[names[0]].mask
    shape, count = first.shape[:-1], len(names)
    most = torch.randint(1, count + 1, shape, device=first.device)
    # A random order of the layers at each position; the first of it are replaced.
    places = torch.rand(*shape, count, device=first.device).argsort(-1).argsort(-1)
    chosen = places < most.unsqueeze(-1)
    return {name: Masks(masks[name].mask, masks[name].delta, chosen[..., at]) for at, name in enumerate(names)}


def whole(masks: LayerMasks, reconstruct: Reconstruct) -> Tensor:
    """Return all layers replaced at once."""
    return reconstruct(masks)


def layerwise(masks: LayerMasks, reconstruct: Reconstruct) -> Tensor:
    """One layer replaced at a time: the mean over layers."""
    errors = [reconstruct({name: mask}) for name, mask in masks.items()]
    return torch.stack(errors).sum() / len(errors)


def subset(masks: LayerMasks, reconstruct: Reconstruct) -> Tensor:
    """Random layers replaced at each position."""
    return reconstruct(routed_to_some(masks))


RECONSTRUCTIONS: Mapping[str, tuple[str, Callable[[LayerMasks, Reconstruct], Tensor]]] = {
    "stochastic": ("stochastic", whole),
    "stochastic_layerwise": ("stochastic", layerwise),
    "stochastic_subset": ("stochastic", subset),
    "importance_masked": ("importance", whole),
    "importance_masked_layerwise": ("importance", layerwise),
    "importance_masked_subset": ("importance", subset),
    "unmasked": ("ones", whole),
}
"""By name: which masks, and which layers have them."""
LOSSES: Sequence[str] = ("minimality", "faithfulness", *RECONSTRUCTIONS)
