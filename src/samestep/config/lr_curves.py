"""Learning-rate curves by name: the share of the full rate by how often a schedule has moved on.

Pure numbers, so that a config that names one can be checked without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

Every = Literal["step", "epoch", "evaluation"]
Curve = Callable[[int], float]
"""The share of the full rate by how often the schedule has moved on."""


def _linear(length: int, final: float) -> Curve:
    return lambda moved: 1 - (1 - final) * min(moved / length, 1.0)


def _cosine(length: int, final: float) -> Curve:
    return lambda moved: final + (1 - final) * _half_cosine(min(moved / length, 1.0))


def _warm_restarts(final: float, *, T_0: int, T_mult: int = 1) -> Curve:  # noqa: N803 - torch's names
    _require("T_0", T_0, isinstance(T_0, int) and T_0 >= 1, "a whole number from 1")
    _require("T_mult", T_mult, isinstance(T_mult, int) and T_mult >= 1, "a whole number from 1")

    def share(moved: int) -> float:
        period = T_0
        if T_mult == 1:
            moved %= period
        while moved >= period:
            moved, period = moved - period, period * T_mult
        return final + (1 - final) * _half_cosine(moved / period)

    return share


def _step(*, step_size: int, gamma: float = 0.1) -> Curve:
    good = isinstance(step_size, int) and step_size >= 1
    _require("step_size", step_size, good, "a whole number from 1")
    _require("gamma", gamma, gamma > 0, "a number above 0")
    return lambda moved: gamma ** (moved // step_size)


def _one_cycle(
    length: int,
    *,
    pct_start: float = 0.3,
    anneal_strategy: str = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Curve:
    """Return OneCycleLR's factor; the momentum stays."""
    _require("pct_start", pct_start, 0 <= pct_start <= 1, "a share from 0 to 1")
    known = anneal_strategy in ("cos", "linear")
    _require("anneal_strategy", anneal_strategy, known, "cos or linear")
    _require("div_factor", div_factor, div_factor > 0, "a number above 0")
    _require("final_div_factor", final_div_factor, final_div_factor > 0, "a number above 0")
    first, last = 1 / div_factor, 1 / div_factor / final_div_factor
    top = pct_start * length - 1
    middle = [(2 * top, first)] if three_phase else []
    points = [(0.0, first), (top, 1.0), *middle, (length - 1.0, last)]

    def share(moved: int) -> float:
        at = min(float(moved), length - 1.0)
        left, right = next((pair for pair in pairwise(points) if at <= pair[1][0]), (points[-2], points[-1]))
        width = right[0] - left[0]
        gone = (at - left[0]) / width if width else 1.0
        if anneal_strategy == "linear":
            return left[1] + (right[1] - left[1]) * gone
        return right[1] + (left[1] - right[1]) * _half_cosine(gone)

    return share


def _half_cosine(gone: float) -> float:
    """Return a factor that falls from 1 to 0."""
    return (1 + math.cos(math.pi * gone)) / 2


def _require(name: str, value: Any, good: bool, what: str) -> None:
    if not good:
        raise ValueError(f"{name} is {value!r}: it takes {what}")


CURVES: dict[str, tuple[Callable[..., Curve], Every]] = {
    "linear": (_linear, "step"),
    "cosine": (_cosine, "step"),
    "one_cycle": (_one_cycle, "step"),
    "step": (_step, "epoch"),
    "warm_restarts": (_warm_restarts, "step"),
}
"""Each moves from its beginning to `length`, or for ever; with when it moves on."""
