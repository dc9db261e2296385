"""Exact metrics on torchmetrics: accumulated per lane, merged in lane order.

What torchmetrics does between processes (stack every process's state, reduce) is done here
between lanes, so the result is a function of the lanes and not of how ranks share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from samestep.errors import TaskError

if TYPE_CHECKING:  # torchmetrics takes a second to import; only its users need it
    from torchmetrics import Metric

State = dict[str, Any]


class LaneMetrics:
    """One lane's metrics and loss, over all batches of an evaluation."""

    def __init__(self, prototypes: Mapping[str, Metric], device: torch.device) -> None:
        self.metrics = {name: _clone(metric, device) for name, metric in prototypes.items()}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.float64, device=device)

    def add_loss(self, loss_sum: Tensor | float, count: Tensor | float) -> None:
        self._loss += torch.as_tensor(loss_sum).detach()
        self._count += torch.as_tensor(count)

    def state(self) -> tuple[float, float, dict[str, State]]:
        """What other ranks need to know of this lane. This waits for the device."""
        states = {
            name: {attr: _to_cpu(value) for attr, value in metric.metric_state.items()}
            for name, metric in self.metrics.items()
        }
        return float(self._loss), float(self._count), states


def _clone(metric: Metric, device: torch.device) -> Metric:
    clone = metric.clone().to(device)
    clone.reset()
    # We merge; torchmetrics must not start collectives. It looks at the second of these, which
    # it copies from the first only when a metric is made.
    clone.sync_on_compute = clone._to_sync = False
    return clone


def _to_cpu(value: Any) -> Any:
    return [item.cpu() for item in value] if isinstance(value, list) else value.cpu()


def merge_lanes(
    prototypes: Mapping[str, Metric],
    lanes: Sequence[tuple[float, float, dict[str, State]]],
) -> dict[str, float | list[float]]:
    """The values over all lanes, given in lane order: `val_loss` and every metric."""
    loss, count = sum(lane[0] for lane in lanes), sum(lane[1] for lane in lanes)
    values: dict[str, float | list[float]] = {}
    if count:
        values["val_loss"] = loss / count
    for name, prototype in prototypes.items():
        merged = _merge(prototype, [lane[2][name] for lane in lanes])
        values |= _as_numbers(name, merged.compute())
    return values


def _merge(prototype: Metric, states: Sequence[State]) -> Metric:
    merged = _clone(prototype, torch.device("cpu"))
    for attr, reduction in merged._reductions.items():
        values = [state[attr] for state in states]
        if isinstance(values[0], list):
            setattr(merged, attr, [item for value in values for item in value])
            continue
        stacked = torch.stack(values)
        setattr(merged, attr, stacked if reduction is None else reduction(stacked))  # type: ignore[operator]
    merged._update_count = 1  # else compute() warns that nothing was added
    merged._computed = None
    return merged


def _as_numbers(name: str, value: Any) -> dict[str, float | list[float]]:
    if isinstance(value, Mapping):
        return {k: v for key, inner in value.items() for k, v in _as_numbers(key, inner).items()}
    if isinstance(value, Tensor):
        return {name: value.tolist()}
    raise TaskError(f"metric {name} computes a {type(value).__name__}: it must give tensors")
