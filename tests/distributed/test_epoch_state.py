"""What a loop changes between epochs reaches every rank and worker, and is the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import samestep
from samestep.errors import StepError, Stopped
from tests.distributed.running import digest
from tests.distributed.test_own_loops import _keys, _loader, _net
from tests.ranks import run_ranks
from tests.variations import variations


class Scaled(Dataset[Any]):
    scale = 0.0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((8,), self.scale), torch.tensor(index % 4)


def _scales(folder: str, workers: int) -> list[float]:
    seen: list[float] = []
    with samestep.start(**_keys(folder, epochs=3)) as run:
        model, dataset = _net(), Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(dataset, batch_size=32, num_workers=workers)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for epoch in run.epochs():
            dataset.scale = float(epoch + 1)
            for x, y in loader:
                seen += run.gather(x[:, 0]).tolist()
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
    return seen


@pytest.mark.parametrize("workers", variations([0, 2], kept=[0]))
def test_each_epoch_reads_the_dataset_as_it_is_then(tmp_path: Path, workers: int) -> None:
    one, other = run_ranks(_scales, 2, str(tmp_path), workers)
    assert one == other
    assert sorted(one) == [1.0] * 64 + [2.0] * 64 + [3.0] * 64


def _weighted(folder: str) -> list[list[int]]:
    epochs: list[list[int]] = []
    with samestep.start(**_keys(folder, epochs=2)) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(32.0).view(32, 1).repeat(1, 8), torch.arange(32) % 4)
        sampler = WeightedRandomSampler([1.0] * 16 + [0.0] * 16, 32)
        loader = DataLoader(data, batch_size=32, sampler=sampler)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for epoch in run.epochs():
            epochs.append([])
            if epoch:
                sampler.weights = sampler.weights.flip(0)
            for x, y in loader:
                epochs[-1] += [int(value) for value in run.gather(x[:, 0])]
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
    return epochs


def test_each_epoch_draws_by_the_samplers_weights_of_then(tmp_path: Path) -> None:
    (first, second), other = run_ranks(_weighted, 2, str(tmp_path))
    assert other == [first, second]
    assert len(first) == len(second) == 32
    assert max(first) < 16 <= min(second)


def _drawing(folder: str, stop: int | None = None) -> tuple[str, list[float]]:
    draws: list[float] = []
    model: nn.Module = _net()
    try:
        with samestep.start(**_keys(folder, epochs=3)) as run:
            model = _net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = run.prepare(model, optimizer, _loader())
            if stop is not None:
                run.pause_after(stop)
            for _ in run.epochs():
                top = torch.rand(()).item()
                draws.append(top)
                for step in run.steps(loader):
                    draws.append(torch.rand(()).item())
                    noise = draws[-1] + top
                    step.train(lambda b, noise=noise: F.cross_entropy(model(b.x) + noise * b.x[:, :1], b.y))
    except Stopped:
        pass
    return digest(model), draws


@pytest.mark.variation("test_it_resumes_at_another_size: with a draw at the top of an epoch")
def test_a_draw_at_the_top_of_an_epoch_is_the_same_after_a_resume(tmp_path: Path) -> None:
    whole, draws = run_ranks(_drawing, 1, str(tmp_path / "whole"))[0]
    steps = len(draws) // 3 - 1
    assert len(draws) == 3 * (steps + 1)
    for world, stop in ((1, steps), (2, steps + 1), (4, 2 * steps)):
        folder = str(tmp_path / f"parts-{world}-{stop}")
        run_ranks(_drawing, 1, folder, stop)
        for weights, resumed in run_ranks(_drawing, world, folder):
            assert weights == whole
            epoch, within = divmod(stop, steps)
            assert resumed[0] == draws[epoch * (steps + 1)]
            assert resumed[1:] == draws[epoch * (steps + 1) + 1 + within :]


def _small_validation(folder: str, batches: int) -> tuple[Any, ...]:
    with samestep.start(**_keys(folder, epochs=1)) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.arange(4.0 * batches * 8).view(-1, 8).sin()
        valid = DataLoader(TensorDataset(x, torch.arange(len(x)) % 4), batch_size=4)
        model, optimizer, loader, valid = run.prepare(model, optimizer, _loader(), valid)
        for step in run.steps(loader):
            step.train(lambda b: F.cross_entropy(model(b.x), b.y))
        mine = 0
        right: Any = 0
        for x, y in valid:
            mine += 1
            right = right + (model(x).argmax(1) == y).sum()
        return mine, int(run.reduce(right)), run.reduce(mine)


@pytest.mark.parametrize(
    ("batches", "world", "shares"),
    variations(
        [(4, 2, [2, 2]), (4, 4, [1, 1, 1, 1]), (2, 4, [1, 1, 0, 0]), (6, 4, [2, 2, 1, 1]), (12, 2, [8, 4])],
        kept=[(2, 4, [1, 1, 0, 0])],
    ),
)
def test_small_validation_sets_are_shared_out(tmp_path: Path, batches: int, world: int, shares: list[int]) -> None:
    [alone] = run_ranks(_small_validation, 1, str(tmp_path / "alone"), batches)
    found = run_ranks(_small_validation, world, str(tmp_path / "shared"), batches)
    assert [mine for mine, _, _ in found] == shares
    assert {(right, every) for _, right, every in found} == {(alone[1], batches)}


def test_new_parameter_groups_are_refused_by_name(tmp_path: Path) -> None:
    more = {"params": nn.Linear(2, 2).parameters()}
    with samestep.start(**_keys(str(tmp_path))) as run:
        model = _net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.prepare(model, optimizer)
        with pytest.raises(StepError, match=r"SGD.add_param_group was called after run.prepare"):
            optimizer.add_param_group(more)
    optimizer.add_param_group(more)
    assert len(optimizer.param_groups) == 2
