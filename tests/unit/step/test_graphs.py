"""What a recording depends on, and what keeps a run from one; replays need a GPU (tests/gpu)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import TensorDataset

import samestep
from samestep.config import load_config
from samestep.data.batch import LaneBatch
from samestep.errors import GraphError
from samestep.step import graphs
from samestep.step.graphs import why_no_graph, why_no_update
from samestep.step.recorded_step import _CapturedBatch, _close, _equal
from tests.emulated_graphs import emulated_graphs
from tests.variations import variations

GPU = torch.device("cuda", 0)
PARAMS = [nn.Parameter(torch.ones(2))]


@pytest.fixture(autouse=True)
def own_tensors() -> Iterator[None]:
    """An emulated capture copies all tensors that the collector knows: spare it those of earlier tests."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    ("values", "device", "optimizer", "words"),
    [
        ({}, torch.device("cpu"), AdamW(PARAMS, fused=True), "this rank runs on cpu"),
        ({"same": "rounding"}, GPU, AdamW(PARAMS, fused=True), "uses DistributedDataParallel"),
        ({"memory": {"lane_split": 2}}, GPU, AdamW(PARAMS, fused=True), "memory.lane_split"),
        ({"memory": {"checkpoint": ["a"]}}, GPU, AdamW(PARAMS, fused=True), "memory.checkpoint"),
        ({"speed": {"graph": True}}, GPU, AdamW(PARAMS), "make it AdamW(..., fused=True)"),
        ({}, GPU, AdamW(PARAMS), None),
        ({}, GPU, AdamW(PARAMS, fused=True), None),
    ],
)
def test_what_keeps_a_run_from_graphs_is_named(
    values: dict[str, Any], device: torch.device, optimizer: Any, words: str | None
) -> None:
    config = load_config({"global_batch": 8, "epochs": 1, **values})
    why = why_no_graph(config, device, [optimizer])
    assert why is None if words is None else words in (why or "")


def test_an_optimizer_that_reads_its_rate_on_the_host_updates_without_a_graph() -> None:
    assert "make it SGD(..., fused=True)" in (why_no_update([SGD(PARAMS, lr=0.1)]) or "")
    assert why_no_update([AdamW(PARAMS, fused=True)]) is None


def test_a_recorded_batch_has_a_size_and_no_samples() -> None:
    batch = _CapturedBatch(3, (torch.zeros(2), torch.ones(2)), (7, 8))
    assert isinstance(batch, LaneBatch)
    assert len(batch) == 2
    assert torch.equal(batch.y, torch.ones(2))
    assert batch.lane == 3, "every lane is recorded by itself"
    for name in ("ids", "step", "epoch"):
        with pytest.raises(GraphError, match=f"reads batch.{name}"):
            getattr(batch, name)


def test_overflows_at_the_same_places_are_equal() -> None:
    bad = torch.tensor([1.0, float("nan"), float("inf")])
    assert _equal([bad, None], [bad.clone(), None])
    assert not _equal([bad], [torch.tensor([1.0, 2.0, float("inf")])])
    assert not _equal([bad], [None])
    assert _close([torch.tensor([100.0, 0.05])], [torch.tensor([100.0, 0.0])], tolerance=1e-3)
    assert not _close([torch.tensor([1.0])], [torch.tensor([2.0])], tolerance=1e-3)


# -- with emulated graphs -------------------------------------------------------------------------


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def trained(folder: Path, graph: bool | str, kind: str) -> tuple[Tensor, str]:
    """The weights after twelve steps in which something of this kind changes; what was said."""
    config = {
        "global_batch": 8, "lanes": 4, "steps": 12, "run_dir": str(folder), "log_every": 1,
        "checkpoint": {"enabled": False}, "speed": {"graph": graph},
        "distributed": {"device": "cpu"},
    }  # fmt: skip
    torch.manual_seed(0)
    model = Scaled(4, 2)
    model.scale = weight = 1.0

    def loss(batch: LaneBatch) -> tuple[Tensor, int]:
        return weight * F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)

    with emulated_graphs() if graph else nullcontext(), samestep.start(config) as run:
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=kind == "momentum")
        run.prepare(model, optimizer, samestep.Schedule(cycle))
        data = TensorDataset(torch.arange(64.0).view(16, 4) / 64, torch.arange(16) % 2)
        for step in run.steps(data):
            if kind == "closure":
                weight = 1.0 + step.index
            if kind == "module":
                model.scale = 1.0 + step.index
            step.train(loss)
    return model.weight.detach().clone(), (folder / "logs" / "rank-0.log").read_text()


KINDS = {
    "nothing": ("steps are replayed from here on", "keeps changing"),
    "closure": ("weight (which the loss function refers to) keeps changing", "\0"),
    "module": ("Scaled.scale keeps changing, which a replay would not follow", "\0"),
    "momentum": ("without a graph: SGD's group 0.momentum keeps changing", "a step runs without"),
}


@pytest.mark.parametrize("kind", variations(KINDS, kept=["nothing", "module"]))
def test_what_changes_on_the_host_is_followed(kind: str, tmp_path: Path) -> None:
    words, others = KINDS[kind]
    eager, _ = trained(tmp_path / "eager", False, kind)
    found, said = trained(tmp_path / "auto", "auto", kind)
    assert torch.equal(found, eager)
    assert words in said, said
    assert others not in said
    if kind in ("closure", "module"):
        with pytest.raises(GraphError, match="keeps changing"):
            trained(tmp_path / "strict", True, kind)


def in_steps(folder: Path, data: Any, **values: Any) -> str:
    """What a run of emulated graphs over this data said."""
    config = {
        "global_batch": 8, "lanes": 4, "run_dir": str(folder), "checkpoint": {"enabled": False},
        "distributed": {"device": "cpu"}, **values,
    }  # fmt: skip
    model = nn.Linear(1, 2)
    with emulated_graphs(), samestep.start(config) as run:
        run.prepare(model, SGD(model.parameters(), lr=0.1))
        for step in run.steps(data, order=samestep.orders.sequential(len(data))):
            step.train(lambda batch: (model(batch.data.view(-1, 1)).sum(), len(batch)))
    return (folder / "logs" / "rank-0.log").read_text()


class Lengths:
    """Samples whose length is that of their step: six lengths, one after the other."""

    def __len__(self) -> int:
        return 8 * 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1 + index // 8)


def test_batches_of_many_shapes_are_captured_up_to_a_number_and_that_is_said_once(tmp_path: Path) -> None:
    said = in_steps(tmp_path / "run", Lengths(), epochs=5)
    assert said.count("steps are replayed from here on") == 4
    assert said.count("batches have more than 4 shapes") == 1


@pytest.mark.parametrize("width", variations([3, 16], kept=[3]))
def test_a_capture_that_memory_is_too_small_for_is_tried_with_fewer_lanes_at_once(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tried = graphs.GraphedSteps._check_capture, []

    def check(self: Any, lanes: Any, eager: Any, lanes_at_once: int, *args: Any) -> None:
        tried.append(lanes_at_once)
        if lanes_at_once > 1:
            raise torch.OutOfMemoryError("too much")
        real(self, lanes, eager, lanes_at_once, *args)

    monkeypatch.setattr(graphs.GraphedSteps, "_check_capture", check)
    said = in_steps(tmp_path / "run", Lengths(), epochs=4, steps_per_epoch=1, speed={"parallel_lanes": width})
    assert tried[0] == min(width, 4)
    assert tried[-1] == 1
    assert "1 of 4 lanes side by side" in said


def test_half_of_the_free_memory_is_for_lanes_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_SHARE", 0.0)
    said = in_steps(tmp_path / "run", Lengths(), epochs=4, steps_per_epoch=1)
    assert "1 of 4 lanes side by side" in said
