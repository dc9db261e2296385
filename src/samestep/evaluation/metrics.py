"""Exact metrics: accumulated per lane, merged in lane order, with flat names that are never the same twice."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from samestep.errors import TaskError
from samestep.evaluation.metric_states import NestedStates, is_torchmetrics
from samestep.lanes.random_streams import METRICS, RngStreams
from samestep.pytree import move
from samestep.step.loss_terms import Term

Number = float | list[float]
SHOWN = 6
"""Number of values on a line of the console; the tracked file has all."""


def flatten(values: Mapping[str, Any]) -> dict[str, Number]:
    """Numbers and lists of them, by name; a value inside another is `OUTER/INNER`.

    Raises:
        TaskError: If two values get the same name, or one is no number.
    """
    found: dict[str, Number] = {}
    for name, value in values.items():
        for path, number in _numbers(str(name), value):
            refuse_double(found, {path: number})
            found[path] = number
    return found


def refuse_double(known: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Raise if two sets of values have a name in common."""
    for name in more:
        if name in known:
            raise TaskError(f"two values of the evaluation are called {name}: rename a metric")


def _numbers(name: str, value: Any) -> Iterator[tuple[str, Number]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}", inner)
    else:
        yield name, _plain(name, value)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, (int, float)):
        return value
    raise TaskError(
        f"metric {name} computes a {type(value).__name__}: it must give numbers, tensors, or lists or mappings of them"
    )


def console_text(values: Mapping[str, Number], monitored: str) -> str:
    """Return the values that a person follows: the loss, the monitored one, and few others."""
    scalars = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    first = [name for name in scalars if name.endswith("val_loss") or name == monitored]
    others = [name for name in scalars if name not in first and "/" not in name]
    shown = [*first, *others[: max(0, SHOWN - len(first))]]
    text = "  ".join(f"{name} {scalars[name]:.4f}" for name in shown)
    hidden = len(values) - len(shown)
    return text + (f"  (and {hidden} in metrics.jsonl)" if hidden else "")


LOSS = "val_loss"
LaneState = tuple[dict[str, tuple[float, float]], dict[str, Any]]
"""A lane's losses with what they were summed over, and its metrics' states; both by name."""


class MetricMerger(Protocol):
    """Copies one metric of a task for each lane, and merges it over them."""

    def copy(self, device: torch.device, copies: dict[int, Any]) -> Any:
        """Return a metric that has seen nothing yet; `copies` is deepcopy's memo of the lane."""

    def state(self, metric: Any) -> Any:
        """Return what other ranks need to know of a lane's copy, in host memory."""

    def merge(self, lanes: Sequence[Any]) -> Any:
        """One metric that has seen what all lanes have; their states are in lane order."""


class WholeObjects:
    """Merges objects with `merge_state(others)`, as torcheval's have, or `merge(other)`."""

    def __init__(self, name: str, prototype: Any) -> None:
        self._name, self._prototype = name, prototype
        self._refuse_unpicklable()  # now, and not after a first epoch

    def copy(self, device: torch.device, copies: dict[int, Any]) -> Any:
        copied = copy.deepcopy(self._prototype, copies)
        return copied.to(device) if hasattr(copied, "to") else copied

    def state(self, metric: Any) -> Any:
        """Return the metric itself, with its tensors in host memory: other ranks may have other devices."""
        host = torch.device("cpu")
        if hasattr(metric, "to"):  # it may hold the device by name
            return metric.to(host)
        found = copy.copy(metric)
        if hasattr(found, "__dict__"):
            vars(found).update(move(vars(found), host))
        return found

    def _refuse_unpicklable(self) -> None:
        try:
            pickle.dumps(self._prototype)
        except Exception as error:  # whatever the object's own code raises
            raise TaskError(
                f"metric {self._name}: {type(self._prototype).__name__} cannot be pickled, so no "
                f"other rank can receive it: {error}"
            ) from error

    def merge(self, lanes: Sequence[Any]) -> Any:
        first, *others = lanes
        if hasattr(first, "merge_state"):
            first.merge_state(others)
        else:
            for other in others:
                first.merge(other)
        return first


def mergers_of(metrics: Mapping[str, Any]) -> dict[str, MetricMerger]:
    """Return how each metric is merged.

    Raises:
        TaskError: Naming a metric that cannot be merged, and why.
    """
    for name in (LOSS, "step", "epoch"):
        if name in metrics:
            raise TaskError(f"a metric is called {name}, as a value of each evaluation: rename it")
    return {name: _merger(name, metric) for name, metric in metrics.items()}


def _merger(name: str, metric: Any) -> MetricMerger:
    if is_torchmetrics(metric):
        return NestedStates(name, metric)
    kind = type(metric).__name__
    missing = [key for key in ("update", "compute") if not callable(getattr(metric, key, None))]
    if missing:
        raise TaskError(f"metric {name} is a {kind}, which has no {' and no '.join(missing)}")
    if not any(callable(getattr(metric, key, None)) for key in ("merge_state", "merge")):
        raise TaskError(
            f"metric {name}: {kind} cannot be merged over lanes. Give it merge(self, other), which "
            "adds what another lane's copy has seen, or derive it from torchmetrics.Metric"
        )
    return WholeObjects(name, metric)


def make_metrics(make: Callable[[], Mapping[str, Any]], rng: RngStreams, step: int) -> Any:
    """Return a task's metrics for one evaluation, made with the same draws on every rank."""
    rng.enter(METRICS, at=(step,))
    return make()


class LaneMetrics:
    """One lane's metrics and loss, over all batches of an evaluation."""

    def __init__(self, mergers: Mapping[str, MetricMerger], device: torch.device) -> None:
        self._mergers = mergers
        copies: dict[int, Any] = {}
        self.metrics = {name: merger.copy(device, copies) for name, merger in mergers.items()}
        self._device = device
        self._losses: dict[str, Tensor] = {}

    def add_loss(self, value: Term | Mapping[str, Term]) -> None:
        """Add what a batch's loss was, with its count; one or several by name."""
        named = value if isinstance(value, Mapping) else {"": value}
        for name, pair in named.items():
            at = self._losses.setdefault(name, torch.zeros(2, dtype=torch.float64, device=self._device))
            for place, number in enumerate(pair):
                at[place] += torch.as_tensor(number).detach()

    def state(self) -> LaneState:
        """Return what other ranks need to know of this lane. This waits for the device."""
        metrics = self.metrics.items()
        states = {name: self._mergers[name].state(metric) for name, metric in metrics}
        losses = {name: tuple(pair.tolist()) for name, pair in self._losses.items()}
        return losses, states


def merge_lanes(
    mergers: Mapping[str, MetricMerger], lanes: Sequence[LaneState], weights: Mapping[str, float] | None = None
) -> dict[str, float | list[float]]:
    """Return the values over all lanes: `val_loss` and every metric, by name.

    Args:
        lanes: What `LaneMetrics.state` returned, in lane order.
    """
    found: dict[str, Any] = _mean_losses([losses for losses, _ in lanes], weights or {})
    for name, merger in mergers.items():
        found[name] = merger.merge([states[name] for _, states in lanes]).compute()
    return flatten(found)


def _mean_losses(lanes: Sequence[Mapping[str, tuple[float, float]]], weights: Mapping[str, float]) -> dict[str, float]:
    """`val_loss`, and `val_loss/NAME` for each loss that has a name."""
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for lane in lanes for name in lane):
        pairs = [lane[name] for lane in lanes if name in lane]
        count = sum(pair[1] for pair in pairs)
        if count:
            means[name] = sum(pair[0] for pair in pairs) / count
    if not means or "" in means:
        return {LOSS: means[""]} if means else {}
    whole = sum(weights.get(name, 1.0) * mean for name, mean in means.items())
    return {LOSS: whole, **{f"{LOSS}/{name}": mean for name, mean in means.items()}}
