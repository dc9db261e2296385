"""Metrics inside metrics, merged over lanes; and those that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.image import PeakSignalNoiseRatio
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    MetricTracker,
    MinMaxMetric,
    MultioutputWrapper,
    Running,
)
from torchmetrics.wrappers.abstract import WrapperMetric

from samestep.errors import TaskError
from samestep.evaluation.metric_states import NestedStates
from samestep.evaluation.metrics import flatten

CPU = torch.device("cpu")
LANES = 6
SCORES = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
LABELS = torch.randint(0, 5, (40,), generator=torch.Generator().manual_seed(1))

Update = Callable[[Any, Tensor, Tensor], Any]


def classify(metric: Any, scores: Tensor, labels: Tensor) -> None:
    metric.update(scores, labels)


def regress(metric: Any, scores: Tensor, labels: Tensor) -> None:
    metric.update(scores[:, 0], scores[:, 1])


def in_pairs(metric: Any, scores: Tensor, labels: Tensor) -> None:
    metric.update(scores[:, :2], scores[:, 2:4])


def accuracy(average: Any = "micro", top_k: int = 1) -> Metric:
    return MulticlassAccuracy(5, average=average, top_k=top_k)


def tracked(metric: Any) -> MetricTracker:
    tracker = MetricTracker(metric, maximize=True)
    tracker.increment()
    return tracker


def over_lanes(metric: Any, update: Update = classify, size: int = 3) -> dict[str, Any]:
    """The values with batches distributed to lanes, as evaluations do."""
    merger = NestedStates("m", metric)
    lanes = [merger.copy(CPU, {}) for _ in range(LANES)]
    for number, start in enumerate(range(0, 40, size)):
        part = slice(start, start + size)
        update(lanes[number % LANES], SCORES[part], LABELS[part])
    return flatten({"m": merger.merge([merger.state(lane) for lane in lanes]).compute()})


@pytest.mark.parametrize("size", [3, 20, 40])  # with the larger ones some lanes have no batch
@pytest.mark.parametrize(
    ("make", "update"),
    [
        (accuracy, classify),
        (lambda: MulticlassAUROC(5), classify),
        (lambda: MinMaxMetric(accuracy()), classify),
        (lambda: 2 * accuracy() - MulticlassF1Score(5), classify),
        (lambda: ClasswiseWrapper(accuracy(None)), classify),
        (lambda: MetricCollection({"a": accuracy(), "b": accuracy(top_k=2)}), classify),
        (lambda: MetricCollection([accuracy(), MulticlassF1Score(5)], prefix="x_"), classify),
        (lambda: MetricCollection({"a": MinMaxMetric(accuracy()), "b": 2 * accuracy()}), classify),
        (lambda: tracked(accuracy()), classify),
        (lambda: tracked(MetricCollection([accuracy(), MulticlassF1Score(5)])), classify),
        (lambda: MultioutputWrapper(MeanSquaredError(), 2), in_pairs),
        (PearsonCorrCoef, regress),
        (lambda: PeakSignalNoiseRatio(data_range=3.3), in_pairs),
    ],
)
def test_nested_metrics_compute_what_one_over_the_whole_set_does(
    make: Callable[[], Any], update: Update, size: int
) -> None:
    whole = make()
    update(whole, SCORES, LABELS)
    expected = flatten({"m": whole.compute()})
    found = over_lanes(make(), update, size)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def test_metrics_that_agree_on_a_first_sample_are_not_taken_for_one() -> None:
    """torchmetrics lets those of a collection share a state that are equal after one batch."""
    found = over_lanes(MetricCollection({"a": accuracy(), "b": accuracy(top_k=2)}), size=1)
    assert found["m/b"] > found["m/a"]


def test_a_bootstrap_draws_again_what_it_drew() -> None:
    def drawing(metric: Any, scores: Tensor, labels: Tensor) -> None:
        torch.manual_seed(int(labels.sum()))
        metric.update(scores, labels)

    found = [over_lanes(BootStrapper(accuracy(), num_bootstraps=3), drawing) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["m/std"] > 0


def test_no_copy_syncs_with_other_processes() -> None:
    class Never(SumMetric):
        def _sync_dist(self, *args: Any, **more: Any) -> None:
            raise AssertionError("a collective")

    inner = Never(distributed_available_fn=lambda: True, dist_sync_on_step=True)
    copied = NestedStates("m", MinMaxMetric(inner)).copy(CPU, {})
    copied._base_metric(torch.ones(2))
    assert copied.compute()["raw"] == 2


class Inferring(SumMetric):
    """Takes a setting from the data, as some metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: int | None = None
        self.kind: torch.dtype | None = None

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.classes, self.kind = self.width(scores, labels), scores.dtype
        super().update(scores)

    def width(self, scores: Tensor, labels: Tensor) -> int:
        return scores.shape[1]

    def compute(self) -> dict[str, Any]:
        assert self.kind is torch.float32
        return {"classes": self.classes}


class InferringLabels(Inferring):
    def width(self, scores: Tensor, labels: Tensor) -> int:
        return int(labels.sum())


def test_a_setting_that_all_lanes_inferred_alike_is_kept() -> None:
    assert over_lanes(Inferring()) == {"m/classes": 5}
    with pytest.raises(TaskError, match="InferringLabels keeps classes, and it differs"):
        over_lanes(InferringLabels())


class SawSmall(Inferring):
    """Raises a flag in some lanes only."""

    small = False

    def update(self, scores: Tensor, labels: Tensor) -> None:
        if (labels[0] == labels).all():
            self.small = True


def test_a_flag_that_only_some_lanes_raised_is_refused() -> None:
    with pytest.raises(TaskError, match="SawSmall keeps small, and it differs between lanes"):
        over_lanes(SawSmall(), size=2)


class Renamed(WrapperMetric):
    """A wrapper with a setting of its own, taken from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SumMetric()
        self.kind: torch.dtype | None = None

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.kind = scores.dtype
        self.inner.update(scores)

    def compute(self) -> dict[str, Tensor]:
        return {str(self.kind): self.inner.compute()}


@pytest.mark.parametrize("size", [3, 20])
def test_a_lane_without_batches_has_no_say(size: int) -> None:
    found = over_lanes(Renamed(), size=size)
    assert found == {"m/torch.float32": pytest.approx(SCORES.sum().item(), rel=1e-5)}


class Custom(Metric):
    """A metric whose state is joined by the function it is given."""

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=reduction)

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.total = self.total + scores.sum()

    def compute(self) -> Tensor:
        return self.total  # type: ignore[return-value]


class InLists(SumMetric):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [SumMetric()]


class Remembering(SumMetric):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.seen.append(scores.sum().item())


def test_a_function_of_the_stacked_values_merges_them() -> None:
    expected = pytest.approx(SCORES.sum().item(), rel=1e-5)
    assert over_lanes(Custom(lambda stacked: stacked.sum(0)))["m"] == expected


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (Running(SumMetric()), "metric m: Running is over the last updates"),
        (MetricCollection({"a": Running(SumMetric())}), "metric m: Running is over the last"),
        (InLists(), "metric m: InLists holds metrics in parts"),
        (MinMaxMetric(Custom(None)), "metric m: Custom does not say how its state total is merged"),
    ],
)
def test_some_are_refused_before_anything_is_measured(metric: nn.Module, reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        NestedStates("m", metric)


def test_what_torchmetrics_itself_merges_wrongly_is_refused() -> None:
    nrmse = pytest.importorskip("torchmetrics.regression.nrmse")  # not in the oldest we support
    with pytest.raises(TaskError, match="metric m: torchmetrics cannot merge the states of more"):
        NestedStates("m", nrmse.NormalizedRootMeanSquaredError())


def call(metric: Any, scores: Tensor, labels: Tensor) -> None:
    metric(scores, labels)


@pytest.mark.parametrize(
    ("metric", "update", "reason"),
    [
        (Custom("mean"), classify, "Custom has the mean of lanes of other sizes in total"),
        (Remembering(), classify, "Remembering keeps seen, which is no state of add_state"),
        (BootStrapper(accuracy()), call, "BootStrapper forgets earlier batches when it is called"),
        (MinMaxMetric(accuracy()), call, "MinMaxMetric keeps max_val"),
    ],
)
def test_others_are_refused_by_what_they_kept(metric: Any, update: Update, reason: str) -> None:
    with pytest.raises(TaskError, match=f"metric m cannot be merged over lanes: .*{reason}"):
        over_lanes(metric, update)
