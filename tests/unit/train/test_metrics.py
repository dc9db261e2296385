"""Metrics of lanes, merged as if one process had seen every sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, SumMetric

from samestep.errors import TaskError
from samestep.train.metrics import LaneMetrics, merge_lanes

CPU = torch.device("cpu")
SAMPLES = [[1.0, 5.0], [], [2.0, 2.0, 10.0]]
"""By lane; the second one is empty."""


def merged(prototypes: dict[str, Metric], lanes: list[list[float]] = SAMPLES) -> dict[str, Any]:
    states = []
    for samples in lanes:
        lane = LaneMetrics(prototypes, CPU)
        for sample in samples:
            for metric in lane.metrics.values():
                metric.update(torch.tensor([sample]))
            lane.add_loss(sample, 1)
        states.append(lane.state())
    return merge_lanes(prototypes, states)


@pytest.mark.parametrize("kind", [SumMetric, MeanMetric, MaxMetric])
def test_lanes_merge_to_what_one_metric_would_have_computed(kind: Any) -> None:
    single = kind()
    for samples in SAMPLES:
        for sample in samples:
            single.update(torch.tensor([sample]))
    assert merged({"m": kind()})["m"] == single.compute().item()


def test_the_loss_is_the_mean_over_all_samples_and_not_over_lanes() -> None:
    assert merged({})["val_loss"] == 4.0


def test_losses_are_added_in_double_precision() -> None:
    lane = LaneMetrics({}, CPU)
    for loss in (2.0**24, 1.0):
        lane.add_loss(torch.tensor(loss, requires_grad=True), torch.tensor(1))
    assert lane.state()[:2] == (2.0**24 + 1, 2.0)


def test_without_a_count_there_is_no_loss() -> None:
    assert merged({}, [[], []]) == {}


def test_lists_of_values_stay_in_lane_order() -> None:
    class Listing(Metric):
        """A metric whose state is a list."""

        def __init__(self) -> None:
            super().__init__()
            self.add_state("seen", default=[], dist_reduce_fx=None)

        def update(self, value: Tensor) -> None:
            self.seen.append(value)  # type: ignore[union-attr, operator]

        def compute(self) -> Tensor:
            return torch.cat(list(self.seen))  # type: ignore[arg-type]

    assert merged({"m": Listing()})["m"] == [1.0, 5.0, 2.0, 2.0, 10.0]
    with_empty = merged({"m": CatMetric()}, [[1.0], [3.0, 2.0]])
    assert with_empty["m"] == [1.0, 3.0, 2.0]


def test_the_prototype_is_neither_used_nor_changed() -> None:
    prototype = SumMetric()
    prototype.update(torch.tensor(100.0))
    assert merged({"m": prototype})["m"] == 20.0
    assert prototype.compute() == 100.0


class Returning(Metric):
    """A metric that computes what it is given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def update(self, value: Tensor) -> None:
        pass

    def compute(self) -> Any:
        return self._value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(0.5), {"m": 0.5}),
        (torch.tensor([1, 2]), {"m": [1, 2]}),
        ({"a": torch.tensor(1.0), "b": {"c": torch.tensor(2.0)}}, {"a": 1.0, "c": 2.0}),
    ],
)
def test_results_become_numbers_by_name(value: Any, expected: dict[str, Any]) -> None:
    assert merged({"m": Returning(value)}, [[]]) == expected


def test_a_result_that_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match="metric m computes a str: it must give tensors"):
        merged({"m": Returning("text")}, [[]])
