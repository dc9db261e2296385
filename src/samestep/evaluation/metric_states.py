"""The states of torchmetrics' metrics, one inside another: copied for a lane, read, merged over lanes.

What torchmetrics does between processes (stack every process's state, reduce) is done here
between lanes, so the result is a function of the lanes and not of how ranks share them.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.errors import TaskError
from samestep.pytree import digest, leaves, map_leaves

if TYPE_CHECKING:  # torchmetrics takes a second to import; only its users need it
    from torchmetrics import Metric

_CPU = torch.device("cpu")
_BOOKKEEPING = {"_update_count", "_computed", "_forward_cache", "_cache", "_is_synced", "_to_sync",
                "_should_unsync", "_enable_grad", "_dtype_convert", "_device", "_dtype",
                "compute_on_cpu", "training", "_defaults", "_persistent", "_reductions",
                "_modules", "_parameters"}  # fmt: skip
"""Attributes that torch and torchmetrics move themselves; all others are the metric's own."""
_SETTINGS = (bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_AMOUNTS = (int, float, complex, np.generic, np.ndarray, Tensor)


@dataclass(frozen=True)
class MetricState:
    """One lane's state of one metric, without those inside it."""

    updates: int
    values: dict[str, Any]
    inferred: dict[str, Any] = field(default_factory=dict)
    """Attributes that updates changed and that may be settings, such as a number of classes."""
    refused: tuple[str, ...] = ()
    """Why this lane's part cannot be merged."""


States = dict[str, MetricState]
"""States of a metric and of all inside it, by the path to each of them."""


def is_torchmetrics(metric: Any) -> bool:
    """Return whether this is a metric, a collection or a wrapper of torchmetrics, or derived from one."""
    return any(base.__module__.startswith("torchmetrics.") for base in type(metric).__mro__)


class NestedStates:
    """Merges a torchmetrics metric by the states that it and the metrics inside it declare."""

    def __init__(self, name: str, prototype: Any) -> None:
        self._name, self._prototype = name, prototype
        self._fresh: dict[str, dict[str, str]] = {}
        for _, metric in _metrics_in(prototype):
            _refuse_at_start(name, metric)

    def copy(self, device: torch.device, copies: dict[int, Any]) -> Any:
        """Return a metric like the prototype that has seen nothing yet.

        Args:
            copies: The lane's copies so far: two metrics may hold the same one.
        """
        copied = copy.deepcopy(self._prototype, copies).to(device)
        for part in copied.modules():
            _separate_groups(part)
        for path, metric in _metrics_in(copied):
            metric.reset()
            # We merge: torchmetrics must not start collectives, neither in compute nor in forward.
            metric.distributed_available_fn = _never
            if path not in self._fresh:  # all copies are alike
                own = _own_attributes(metric)
                self._fresh[path] = {key: digest(value) for key, value in own.items()}
        return copied

    def state(self, metric: Any) -> States:
        """Return what other ranks need to know of a lane's copy. This waits for the device."""
        return {path: self._state_of(path, part) for path, part in _metrics_in(metric)}

    def _state_of(self, path: str, metric: Metric) -> MetricState:
        from torchmetrics.wrappers.abstract import WrapperMetric

        is_wrapper, kind = isinstance(metric, WrapperMetric), type(metric).__name__
        before, inferred, refused = self._fresh[path], {}, []
        for key, value in _own_attributes(metric).items():
            if before.get(key) == digest(value):
                continue
            if isinstance(value, _SETTINGS) or before.get(key) in (None, digest(None)):
                inferred[key] = value
            else:
                refused.append(f"{kind} keeps {key}, which is no state of add_state")
        if is_wrapper and metric._forward_cache is not None:
            refused.append(f"{kind} forgets earlier batches when it is called: call its update")
        values = {} if _shares_states(metric) else {k: getattr(metric, k) for k in metric._defaults}
        updates = metric._update_count
        if is_wrapper:  # torchmetrics does not count its updates, but those inside it
            inside = [part._update_count for _, part in _metrics_in(metric) if part is not metric]
            updates = max(inside, default=1)
        return MetricState(updates, _on_host(values), _on_host(inferred), tuple(sorted(refused)))

    def merge(self, lanes: Sequence[States]) -> Any:
        """One metric that has seen what all lanes have.

        Args:
            lanes: Their states, in lane order.

        Raises:
            TaskError: If a metric keeps something that cannot be merged.
        """
        reasons = {text for lane in lanes for state in lane.values() for text in state.refused}
        merged = self.copy(_CPU, {})
        for path, metric in _metrics_in(merged):
            states = [lane[path] for lane in lanes if lane[path].updates]
            metric._update_count = sum(state.updates for state in states)
            if states:
                reasons |= set(_take_inferred(metric, states))
                reasons |= set(_take_values(metric, states))
        if reasons:
            raise TaskError(f"metric {self._name} cannot be merged over lanes: {'; '.join(sorted(reasons))}")
        return merged


def _refuse_at_start(name: str, metric: Metric) -> None:
    """Raise if it is known without data that this metric cannot be merged."""
    from torchmetrics import Metric
    from torchmetrics.wrappers import Running

    kind = type(metric).__name__
    if isinstance(metric, Running):
        raise TaskError(
            f"metric {name}: {kind} is over the last updates, and each lane makes its own. Use the "
            "metric inside it, which is over the whole set"
        )
    if kind == "NormalizedRootMeanSquaredError":
        raise TaskError(
            f"metric {name}: torchmetrics cannot merge the states of more than two {kind}. Divide "
            "MeanSquaredError's root by what normalises it"
        )
    for key, value in vars(metric).items():
        if key != "_modules" and any(isinstance(item, Metric) for item in _held(value)):
            raise TaskError(
                f"metric {name}: {kind} holds metrics in {key}, where torch does not find them. "
                "Use nn.ModuleList or nn.ModuleDict"
            )
    if _is_ready_made(metric):
        return  # those whose states are only stacked count on it
    for key, default in metric._defaults.items():
        if isinstance(default, Tensor) and metric._reductions[key] is None:
            raise TaskError(
                f"metric {name}: {kind} does not say how its state {key} is merged. Give add_state "
                "a dist_reduce_fx: sum, max, min, cat, or a function of the lanes' stacked values"
            )


def _held(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()


def _is_ready_made(metric: Metric) -> bool:
    bases = {"torchmetrics.metric", "torchmetrics.wrappers.abstract"}
    modules = {base.__module__ for base in type(metric).__mro__} - bases
    return any(module.startswith("torchmetrics.") for module in modules)


def _never() -> bool:
    return False


def _on_host(data: Any) -> Any:
    return map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, data)


def _metrics_in(metric: nn.Module) -> Iterator[tuple[str, Metric]]:
    """Yield a metric and all inside it, by path, each once."""
    from torchmetrics import Metric

    for path, part in metric.named_modules():
        if isinstance(part, Metric):
            yield path, part


def _separate_groups(part: nn.Module) -> None:
    """Let each metric of a collection keep its own state.

    torchmetrics lets those share one whose states are equal after the first batch, which two
    metrics can be by chance, the more so in a lane's few samples.
    """
    from torchmetrics import MetricCollection

    if isinstance(part, MetricCollection) and part._enable_compute_groups is True:
        part._enable_compute_groups, part._groups_checked, part._groups = False, False, {}


def _shares_states(metric: Metric) -> bool:
    """Return whether the states are those of a metric inside it, as in ClasswiseWrapper."""
    children = metric.children()
    return any(getattr(child, "_defaults", None) is metric._defaults for child in children)


def _own_attributes(metric: Metric) -> dict[str, Any]:
    """Return what a metric holds besides declared states, if it can be compared by its content."""
    return {
        key: value
        for key, value in vars(metric).items()
        if key not in _BOOKKEEPING and key not in metric._defaults
        if all(isinstance(leaf, (*_SETTINGS, *_AMOUNTS)) for leaf in leaves(value))
    }


def _take_inferred(metric: Metric, states: Sequence[MetricState]) -> Iterator[str]:
    """Take what all lanes inferred alike; yields why not."""
    for key in {key: None for state in states for key in state.inferred}:
        if len({digest(state.inferred.get(key)) for state in states}) == 1:
            setattr(metric, key, states[0].inferred[key])
        else:
            yield f"{type(metric).__name__} keeps {key}, and it differs between lanes"


def _take_values(metric: Metric, states: Sequence[MetricState]) -> Iterator[str]:
    """Merge the declared states; yields why not."""
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

    kind = type(metric).__name__
    if states[0].values.keys() - metric._defaults.keys():
        yield f"{kind} adds states while it is updated: tell its constructor all sizes"
        return
    for key in states[0].values:
        values = [state.values[key] for state in states]
        reduction: Any = metric._reductions[key]
        if any(isinstance(value, list) for value in values) or reduction is dim_zero_cat:
            joined = [i for v in values for i in (v if isinstance(v, list) else [v])]
            is_list = isinstance(metric._defaults[key], list)
            setattr(metric, key, joined if is_list else dim_zero_cat(joined))
        elif len(values) == 1 or (reduction is dim_zero_mean and all(torch.equal(v, values[0]) for v in values)):
            setattr(metric, key, values[0])
        elif reduction is dim_zero_mean:
            yield f"{kind} has the mean of lanes of other sizes in {key}: keep a sum and a count"
        else:
            stacked = torch.stack(values)
            setattr(metric, key, stacked if reduction is None else reduction(stacked))
