"""Bodies that are put off and replayed, by an emulated graph on a CPU: what is looked at, held or changed in them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.step.lane_tensor import LaneTensor
from tests.distributed.loop_bodies import loader
from tests.distributed.running import digest
from tests.distributed.test_loader_loops import _keys
from tests.ranks import run_ranks
from tests.variations import variations


def _values(tensor: Tensor) -> list[Any]:
    assert isinstance(tensor, LaneTensor)
    return [part.tolist() for part in tensor.per_lane]


def _loop(folder: str, kind: str, emulated: bool) -> tuple[str, list[Any]]:
    from tests.emulated_graphs import emulated_graphs

    found: list[Any] = []
    held: list[Tensor] = []
    with emulated_graphs() if emulated else nullcontext(), samestep.start(**_keys(folder, epochs=4)) as run:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.2), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, data = run.prepare(model, optimizer, loader(drop_last=True))
        for _ in run.epochs():
            for x, y in data:
                if kind != "set to zero" or run.step:
                    optimizer.zero_grad(set_to_none=kind != "set to zero")
                out = model(x)
                loss = F.cross_entropy(out, y)
                if kind == "looks before":
                    found.append(float(run.mean(loss)))
                if kind == "changes":
                    loss = loss * (1 + run.step)
                if kind == "scales weights":
                    with torch.no_grad():
                        model[1].weight.mul_(0.99)
                if kind == "sometimes" and run.step % 3 == 0:
                    loss = loss + 0.1 * out.square().mean()
                if kind == "draws by Python":
                    found.append(torch.rand(2, generator=torch.Generator().manual_seed(run.step)).tolist())
                loss.backward()
                if kind == "holds":
                    held.append(out)
                    found.append(run.sum((out.argmax(1) == y).sum()).item())
                    found.append(run.sum(x.sum()).item())
                optimizer.step()
                found.append(loss.item())
        found += [run.gather(one).sum().item() for one in held]
        return digest(model), found


REPLAYED = {
    "plain": True,
    "holds": True,
    "looks before": False,
    "changes": False,
    "scales weights": False,
    "sometimes": False,
    "draws by Python": True,
    "set to zero": True,
}


@pytest.mark.parametrize("kind", variations(REPLAYED, kept=["holds", "sometimes"]))
def test_they_have_the_bits_of_eager_ones(kind: str, tmp_path: Path) -> None:
    [eager] = run_ranks(_loop, 1, str(tmp_path / "eager"), kind, False)
    for world in (1, 2):
        folder = tmp_path / str(world)
        assert run_ranks(_loop, world, str(folder), kind, True) == [eager] * world
        said = (folder / "logs" / "rank-0.log").read_text()
        assert ("steps are replayed from here on" in said) is REPLAYED[kind], said
        assert ("a loop's body runs without a graph" in said) is not REPLAYED[kind], said
