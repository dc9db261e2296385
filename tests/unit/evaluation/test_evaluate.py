"""Evaluation: each sample once, the same numbers however it is shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import SumMetric

from samestep.data.batch import LaneBatch, Moment
from samestep.errors import TaskError
from samestep.evaluation.evaluate import evaluate
from samestep.run_setup import RunSetup
from tests.unit.data.sources import Rank, setup_of

SAMPLES = torch.arange(13.0)[:, None]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Dropout(0.5).eval()
        self.drop = nn.Dropout(0.5)


def noisy(model: nn.Module, batch: LaneBatch, metrics: Any) -> tuple[Tensor, int]:
    """A loss that draws, as some evaluations do."""
    for metric in metrics.values():
        metric.update(batch.x.sum())
    return (batch.x + torch.rand(len(batch), 1)).sum(), len(batch)


def noisy_values(setup: RunSetup, step: int = 0, model: nn.Module | None = None) -> dict[str, Any]:
    data, metrics = TensorDataset(SAMPLES), {"sum": SumMetric()}
    return evaluate(setup, [model or Model()], Moment(step), data, noisy, metrics, None)


def test_every_sample_counts_once() -> None:
    found = noisy_values(setup_of())
    assert found["sum"] == SAMPLES.sum().item()
    assert 6.0 < found["val_loss"] < 7.0


def test_a_loss_without_a_count_is_the_mean_over_its_batch() -> None:
    def mean(model: nn.Module, batch: LaneBatch, metrics: Any) -> Tensor:
        return batch.x.mean()

    found = evaluate(setup_of(), [Model()], Moment(), TensorDataset(SAMPLES), mean, {}, None)
    assert found["val_loss"] == pytest.approx(SAMPLES.mean().item())


@pytest.mark.parametrize("values", [{"lanes": 2, "global_batch": 2}, {"loader": {"workers": 2}}])
def test_lanes_of_the_same_size_give_the_same_numbers(values: dict[str, Any]) -> None:
    assert noisy_values(setup_of(**values))["val_loss"] == pytest.approx(
        noisy_values(setup_of())["val_loss"], rel=1e-12
    )


def test_draws_follow_from_the_step_that_is_measured() -> None:
    assert noisy_values(setup_of(), step=3) == noisy_values(setup_of(), step=3)
    assert noisy_values(setup_of(), step=3) != noisy_values(setup_of(), step=4)


def test_no_batch_draws_what_another_does() -> None:
    drawn: list[float] = []

    def measure(model: nn.Module, batch: LaneBatch, metrics: Any) -> tuple[Tensor, int]:
        drawn.append(torch.rand(()).item())
        return batch.x.sum(), len(batch)

    evaluate(setup_of(), [Model()], Moment(), TensorDataset(SAMPLES), measure, {}, None)
    assert len(set(drawn)) == len(drawn) == 13


class Sharing(Rank):
    """A rank that gathers what the ranks before it gave, and its own."""

    gathered: list[Any]

    def gather(self, value: Any) -> Any:
        self.gathered.append(value)
        return self.gathered


@pytest.mark.requirement("000-P2-3", "004-KR-3")
@pytest.mark.parametrize("mode", ["sharded", "rank0"])
def test_ranks_share_the_lanes_or_leave_them_to_rank_0(mode: str) -> None:
    alone = noisy_values(setup_of())
    states: list[Any] = []
    for rank in range(2):
        setup = setup_of(rank, 2, evaluation={"mode": mode})
        context = Sharing(rank, 2)
        context.gathered = states
        object.__setattr__(setup, "context", context)
        noisy_values(setup)
    lanes = [[lane for lane, _ in rank] for _, rank in states]
    assert lanes == ([[0, 1], [2, 3]] if mode == "sharded" else [[0, 1, 2, 3], []])

    class All(Rank):
        def gather(self, value: Any) -> Any:
            return states[::-1]  # in any order

    setup = setup_of(0, 2, evaluation={"mode": mode})
    object.__setattr__(setup, "context", All(0, 2))
    assert noisy_values(setup) == alone


def test_the_batch_may_be_larger_than_in_training() -> None:
    sizes: list[int] = []

    def measure(model: nn.Module, batch: LaneBatch, metrics: Any) -> tuple[Tensor, int]:
        sizes.append(len(batch))
        return batch.x.sum(), len(batch)

    setup = setup_of(evaluation={"batch": 5})
    found = evaluate(setup, [Model()], Moment(), TensorDataset(SAMPLES), measure, {}, None)
    assert sizes == [5, 5, 3]
    assert found == {"val_loss": 6.0}


def test_each_modules_mode_is_what_it_was_also_after_an_error() -> None:
    model = Model()
    seen: list[bool] = []

    def fail(model: nn.Module, batch: LaneBatch, metrics: Any) -> tuple[Tensor, int]:
        seen.extend(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate(setup_of(), [model], Moment(), TensorDataset(SAMPLES), fail, {}, None)
    assert seen == [False, False, False]
    assert (model.training, model.drop.training, model.frozen.training) == (True, True, False)
    assert torch.is_grad_enabled()


def test_an_evaluation_runs_in_the_configs_precision() -> None:
    def measure(model: nn.Module, batch: LaneBatch, metrics: Any) -> tuple[Tensor, int]:
        dtypes.add((batch.x @ batch.x.T).dtype)
        return batch.x.sum(), len(batch)

    dtypes: set[torch.dtype] = set()
    setup = setup_of(precision="bf16")
    evaluate(setup, [Model()], Moment(), TensorDataset(SAMPLES), measure, {}, None)
    assert dtypes == {torch.bfloat16}


def test_data_without_a_length_is_refused() -> None:
    with pytest.raises(TaskError, match="validation data must have a length and be indexable, unlike list_iterator"):
        evaluate(setup_of(), [Model()], Moment(), iter([]), noisy, {}, None)
