"""Several losses with names: added by weights, each logged as the mean over its own count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from samestep.errors import TaskError
from tests.unit.step.engines import Steps, inputs, linear

WEIGHTS = {"out": 2.0, "size": 0.5}


def losses(model: nn.Module, per: float = 3.0) -> Any:
    """A loss that counts samples, and one that counts three things in each."""

    def loss(batch: Any) -> dict[str, tuple[Tensor, float]]:
        out = model(batch.x)
        return {"out": (out.sum(), len(batch)), "size": (out.square().sum(), per * len(batch))}

    return loss


def trained(split: int = 1, lanes: int = 4) -> tuple[Steps, Tensor]:
    values = {"loss_weights": WEIGHTS, "memory": {"lane_split": split}}
    steps = Steps(global_batch=8, lanes=lanes, samples=16, **values)
    for step in steps:
        step.train(losses(steps.model))
        if step.index == 1:
            break
    return steps, next(steps.model.parameters()).detach()


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("lanes", [1, 4])
def test_the_gradient_is_that_of_the_weighted_means(lanes: int, split: int) -> None:
    steps, weight = trained(split, lanes)
    model = linear()
    optimizer, expected = SGD(model.parameters(), lr=0.5), []
    optimizer.param_groups[0]["lr"] = steps.prepared.optimizers[0].param_groups[0]["lr"]
    for x in inputs(16).split(8):
        out = model(x)
        means = {"out": out.mean(), "size": out.square().mean() / 3}
        optimizer.zero_grad()
        sum(WEIGHTS[name] * mean for name, mean in means.items()).backward()  # type: ignore[union-attr]
        optimizer.step()
        expected.append({name: mean.item() for name, mean in means.items()})
    torch.testing.assert_close(weight, next(model.parameters()).detach())
    for record, means in zip(steps.records, expected, strict=True):
        assert record.losses == pytest.approx(means)
        assert record.loss == pytest.approx(sum(WEIGHTS[n] * m for n, m in means.items()))
        assert record.values()["loss/size"] == record.losses["size"]


def refused(value: Any, match: str, **values: Any) -> None:
    steps = Steps(**values)
    out = steps.model(inputs(2)).sum()
    with pytest.raises(TaskError, match=match):
        steps.first().train(lambda batch: value(out, batch))


def test_names_and_weights_must_be_the_same() -> None:
    refused(lambda out, b: (out, 1), "returned one loss without a name", loss_weights=WEIGHTS)
    refused(lambda out, b: {"out": (out, 1)}, "the loss returned out", loss_weights=WEIGHTS)
    refused(lambda out, b: {"a": (out, 1), "b": (out, 1)}, r"loss_weights: \{a: 1.0, b: 1.0\}")


def test_counts_must_be_in_one_proportion() -> None:
    steps = Steps(loss_weights=WEIGHTS)
    step = steps.first()
    per = iter((1.0, 2.0))

    def loss(batch: Any) -> Any:
        return losses(steps.model, next(per))(batch)

    with pytest.raises(TaskError, match=r"loss size counts 2.0 where the first loss counts 1"):
        step.train(loss)


def test_counts_as_tensors_must_be_the_same_tensor() -> None:
    def value(out: Tensor, batch: Any) -> Any:
        return {"out": (out, torch.tensor(1.0)), "size": (out, torch.tensor(1.0))}

    refused(value, "has a count of its own as a tensor", loss_weights=WEIGHTS)

    def same(out: Tensor, batch: Any) -> Any:
        count = torch.tensor(1.0)
        return {"out": (out, count), "size": (out, count)}

    steps = Steps(loss_weights=WEIGHTS)
    steps.first().train(lambda batch: same(steps.model(batch.x).sum(), batch))


def test_a_lane_that_counts_nothing_says_nothing_of_the_proportion() -> None:
    steps = Steps(loss_weights=WEIGHTS)
    counts = iter((0, 1, 3, 2))

    def loss(batch: Any) -> Any:
        out, count = steps.model(batch.x).sum(), next(counts)
        return {"out": (out, count), "size": (out, 0.1 * count)}

    steps.first().train(loss)
    assert steps.records[0].count == 6
