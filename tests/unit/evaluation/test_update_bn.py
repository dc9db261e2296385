"""BatchNorm's statistics, measured anew over the training set."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep import orders
from samestep.data.batch import LaneBatch
from samestep.evaluation.update_bn import measure_batchnorm
from tests.unit.data.sources import setup_of

SAMPLES = torch.randn(22, 3, generator=torch.Generator().manual_seed(1)) * 3 + 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.3)
        self.drop = nn.Dropout(0.5)
        self.after = nn.BatchNorm1d(3)
        self.frozen = nn.BatchNorm1d(3)
        self.other = nn.InstanceNorm1d(1, track_running_stats=True)
        self.never = nn.BatchNorm1d(3)

    def train(self, mode: bool = True) -> Net:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.after(self.drop(self.norm(x))))
        return self.other(x[:, None])


def measure(model: nn.Module, forward: Any = lambda m, batch: m(batch.x), *extra: nn.Module, **values: Any) -> bool:
    setup = setup_of(**{"global_batch": 8, "lanes": 2, "epochs": 1, **values})
    data, order = TensorDataset(SAMPLES), orders.sequential(len(SAMPLES))
    return measure_batchnorm(setup, [model, *extra], forward, data, order, None)


def expected(cut: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The mean of batches' means and variances, by their samples."""
    wide = [part.double() for part in cut]
    mean = sum(part.mean(0) * len(part) for part in wide) / len(SAMPLES)
    variance = sum(part.var(0) * len(part) for part in wide) / len(SAMPLES)
    return mean, variance  # type: ignore[return-value]


def test_the_statistics_are_the_mean_over_lane_batches() -> None:
    model = Net().train()
    assert measure(model)
    mean, variance = expected(list(SAMPLES.split(4)))  # 22 samples: five of 4 and one of 2
    assert torch.allclose(model.norm.running_mean.double(), mean, rtol=1e-6)
    assert torch.allclose(model.norm.running_var.double(), variance, rtol=1e-6)
    assert model.after.running_mean.abs().max() < 1e-6, "dropout is off, as in evaluation"
    assert measure(model, loader={"workers": 2})
    assert torch.allclose(model.norm.running_mean.double(), mean, rtol=1e-6)


def test_all_else_is_as_it_was() -> None:
    model = Net().train()
    model(SAMPLES)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert measure(model)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    layers = ("norm", "after")
    assert changed == {f"{a}.{b}" for a in layers for b in ("running_mean", "running_var")}
    assert model.norm.momentum == 0.3
    assert {name for name, module in model.named_modules() if not module.training} == {"frozen"}
    assert "forward" not in vars(model.norm)
    own = model.norm.forward = partial(nn.BatchNorm1d.forward, model.norm)  # type: ignore[method-assign]
    assert measure(model)
    assert vars(model.norm)["forward"] is own


def test_a_failing_forward_leaves_the_model_as_it_was() -> None:
    model = Net().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fail(model: nn.Module, batch: LaneBatch) -> None:
        model(batch.x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure(model, forward=fail)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.norm.momentum == 0.3
    assert model.norm.training
    assert model.drop.training


def test_a_model_without_batchnorm_is_not_even_run() -> None:
    def fail(model: nn.Module, batch: LaneBatch) -> None:
        raise AssertionError("nothing to measure")

    for model in (nn.Linear(3, 1), nn.BatchNorm1d(3, track_running_stats=False), Net().eval()):
        assert not measure(model, forward=fail)


def test_a_layer_called_twice_counts_both_and_only_batches_that_pass_it() -> None:
    model = nn.BatchNorm1d(3)

    def forward(model: nn.Module, batch: LaneBatch) -> None:
        if batch.ids[0] < 4:
            model(batch.x)
            model(batch.x + 1)

    assert measure(model, forward=forward)
    mean = SAMPLES[:4].double().mean(0) + 0.5
    assert torch.allclose(model.running_mean.double(), mean, rtol=1e-6)


def test_extra_modules_are_as_in_evaluation_and_keep_their_statistics() -> None:
    model, head = nn.BatchNorm1d(3), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    modes: set[bool] = set()

    def forward(model: nn.Module, batch: LaneBatch) -> None:
        modes.update(part.training for part in head.modules())
        head(model(batch.x))

    assert measure(model, forward, head)
    assert modes == {False}
    assert all(part.training for part in head.modules())
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    assert not torch.equal(model.running_mean, torch.zeros(3))
