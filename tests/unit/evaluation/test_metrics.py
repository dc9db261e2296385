"""Metrics of lanes, merged as if one process had seen every sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, SumMetric

from samestep.errors import TaskError
from samestep.evaluation.metrics import LaneMetrics, make_metrics, merge_lanes, mergers_of
from samestep.lanes.random_streams import RngStreams

CPU = torch.device("cpu")
SAMPLES = [[1.0, 5.0], [], [2.0, 2.0, 10.0]]
"""By lane; the second one is empty."""


def merged(prototypes: dict[str, Any], lanes: list[list[float]] = SAMPLES) -> dict[str, Any]:
    states, mergers = [], mergers_of(prototypes)
    for samples in lanes:
        lane = LaneMetrics(mergers, CPU)
        for sample in samples:
            for metric in lane.metrics.values():
                metric.update(torch.tensor([sample]))
            lane.add_loss((sample, 1))
        states.append(lane.state())
    return merge_lanes(mergers, states)


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
        lane.add_loss((torch.tensor(loss, requires_grad=True), torch.tensor(1)))
    assert lane.state()[0] == {"": (2.0**24 + 1, 2.0)}


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


def test_a_metric_that_two_others_hold_is_updated_once() -> None:
    total = SumMetric()
    mergers = mergers_of({"total": total, "twice": 2 * total})
    lane = LaneMetrics(mergers, CPU)
    lane.metrics["total"].update(torch.tensor(3.0))
    assert merge_lanes(mergers, [lane.state()]) == {"total": 3.0, "twice": 6.0}


def test_the_prototype_is_neither_used_nor_changed() -> None:
    prototype = SumMetric()
    prototype.update(torch.tensor(100.0))
    assert merged({"m": prototype})["m"] == 20.0
    assert prototype.compute() == 100.0


class Spread:
    """A metric of no library, with torcheval's way to merge."""

    def __init__(self) -> None:
        self.device, self.values = torch.device("cpu"), torch.zeros(0)

    def to(self, device: torch.device) -> Spread:
        self.device, self.values = device, self.values.to(device)
        return self

    def update(self, value: Tensor) -> None:
        self.values = torch.cat([self.values, value])

    def compute(self) -> float:
        return float(self.values.max() - self.values.min())

    def merge_state(self, others: Iterable[Spread]) -> None:
        self.values = torch.cat([self.values, *(other.values for other in others)])


class Listed:
    """A metric with the smallest way to merge."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def update(self, value: Tensor) -> None:
        self.seen.append(value.item())

    def merge(self, other: Listed) -> None:
        self.seen += other.seen

    def compute(self) -> list[float]:
        return self.seen


def test_objects_that_merge_need_no_library() -> None:
    prototypes = {"spread": Spread(), "listed": Listed()}
    found = merged(prototypes)
    assert found["spread"] == 9.0
    assert found["listed"] == [1.0, 5.0, 2.0, 2.0, 10.0]
    assert prototypes["listed"].seen == []  # type: ignore[union-attr]


class NoMerge:
    def update(self, value: Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0


class Unpicklable(Listed):
    def __init__(self) -> None:
        super().__init__()
        self.function = lambda: 0


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (NoMerge(), r"metric m: NoMerge cannot be merged over lanes\. Give it merge\(self, other\)"),
        (0.5, "metric m is a float, which has no update and no compute"),
        (Unpicklable(), "metric m: Unpicklable cannot be pickled"),
    ],
)
def test_other_objects_are_refused_by_name(metric: Any, reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        mergers_of({"m": metric})


@pytest.mark.parametrize("name", ["val_loss", "step", "epoch"])
def test_names_of_every_evaluation_are_taken(name: str) -> None:
    with pytest.raises(TaskError, match=f"a metric is called {name}"):
        mergers_of({name: SumMetric()})


def test_metrics_are_made_with_draws_of_their_step() -> None:
    rng = RngStreams(0, CPU)
    made = [make_metrics(lambda: {"x": torch.rand(())}, rng, step) for step in (3, 4, 3)]
    assert made[0] == made[2] != made[1]
