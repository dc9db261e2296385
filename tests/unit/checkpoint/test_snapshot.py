"""A snapshot: a copy of a state that can be written and read back."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import lr_scheduler as lr

from samestep.checkpoint.format import read_training
from samestep.checkpoint.snapshot import Snapshot
from samestep.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import put, same_bits


def through(tmp_path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as it is after a snapshot, a write and a read."""
    return read_training(put(tmp_path, {}, Snapshot().take(state)))


def test_the_memory_layout_of_an_optimizers_state_is_kept(tmp_path: Path) -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = Adam(model.parameters(), lr=0.1)
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    model(images).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()["state"][0]["exp_avg"]
    assert not before.is_contiguous()
    after = through(tmp_path, optimizer.state_dict())["state"][0]["exp_avg"]
    assert after.stride() == before.stride()
    assert same_bits(after, before)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**80, 0.1, float("inf"), "text", b"bytes", 1j, [1, [2.5]], (1, ("a",)),
        {"a": {1: "b"}}, Counter([1, 1, 2]), torch.Size([1, 2]), torch.float16, {1, 2},
    ],
    ids=repr,
)  # fmt: skip
def test_plain_values_come_back_as_they_were(tmp_path: Path, value: Any) -> None:
    found = through(tmp_path, {"x": value})["x"]
    assert found == value
    assert type(found) is type(value)


def attempt(state: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A snapshot, or why there is none."""
    try:
        return Snapshot().take(state), ""
    except CheckpointError as error:
        return {}, str(error)


Pair = namedtuple("Pair", "a b")


class Colour(IntEnum):
    RED = 1


class Names(list[str]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        np.float32(2.5), np.int64(2), np.bool_(True), np.float64(2.5), np.str_("a"), Pair(1, 2), Colour.RED,
        Names(["a"]), {np.int64(3): 1},
    ],
    ids=lambda value: f"{type(value).__name__} {value}",
)  # fmt: skip
def test_what_can_be_saved_can_be_read_back(tmp_path: Path, value: Any) -> None:
    """Or is refused before it is written, and not when the run resumes."""
    copy, refused = attempt({"kept": {"x": value}})
    if refused:
        assert "kept.x" in refused
    else:
        assert read_training(put(tmp_path, {}, copy))["kept"]["x"] == value


def test_a_number_of_numpy_becomes_a_plain_one() -> None:
    value = Snapshot().take({"x": np.float32(2.5)})["x"]
    assert (type(value), value) == (float, 2.5)


def test_a_schedule_with_a_lambda_in_its_state_is_refused_by_path() -> None:
    class Own(lr.LRScheduler):
        def __init__(self, optimizer: Optimizer) -> None:
            self.shape: Callable[[int], float] = lambda step: 0.5
            super().__init__(optimizer)

        def get_lr(self) -> list[float | Tensor]:
            return [self.shape(0)]

    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    state = {"training": {"schedules": [Own(optimizer).state_dict()]}}
    with pytest.raises(CheckpointError, match=r"^training\.schedules\.0\.shape is a function, which"):
        Snapshot().take(state)


def test_a_snapshot_reuses_its_buffers() -> None:
    snapshot, weight = Snapshot(), torch.ones(3)
    first = snapshot.take({"a": {"b": [weight]}})["a"]["b"][0]
    place = first.data_ptr()
    assert place != weight.data_ptr()
    weight.fill_(2)
    second = snapshot.take({"a": {"b": [weight]}})["a"]["b"][0]
    assert second.data_ptr() == place
    assert second.tolist() == [2, 2, 2]


@pytest.mark.parametrize("now", [torch.ones(4), torch.ones(3, dtype=torch.float64)], ids=str)
def test_a_tensor_that_changed_its_shape_or_type_gets_another_buffer(now: Tensor) -> None:
    snapshot = Snapshot()
    snapshot.take({"a": torch.zeros(3)})
    assert same_bits(snapshot.take({"a": now})["a"], now)


def test_a_tensor_that_changed_its_layout_is_copied_in_the_new_one() -> None:
    snapshot, images = Snapshot(), torch.randn(2, 3, 4, 4)
    snapshot.take({"a": images})
    images = images.contiguous(memory_format=torch.channels_last)
    assert snapshot.take({"a": images})["a"].stride() == images.stride()


@pytest.mark.parametrize("path", ["list", "dict", "tensor", "counter", pytest.param("set")])
def test_a_snapshot_does_not_see_later_changes(path: str) -> None:
    state: dict[str, Any] = {
        "list": [1], "dict": {"a": 1}, "tensor": torch.zeros(2), "counter": Counter(a=1),
        "set": {1},
    }  # fmt: skip
    copy = Snapshot().take(state)
    before = pickle.dumps(copy[path] if path != "tensor" else copy[path].tolist())
    state["list"].append(2)
    state["dict"]["b"] = 2
    state["tensor"].add_(1)
    state["counter"]["a"] += 1
    state["set"].add(2)
    assert pickle.dumps(copy[path] if path != "tensor" else copy[path].tolist()) == before


def test_a_snapshot_needs_no_gradient_and_frees_parameters() -> None:
    model = nn.Linear(2, 2)
    copy = Snapshot().take(dict(model.named_parameters()))
    assert all(type(value) is Tensor and not value.requires_grad for value in copy.values())


def test_names_with_dots_do_not_share_a_buffer() -> None:
    state = {"ema": {"model.w": torch.zeros(2)}, "ema.model": {"w": torch.ones(2)}}
    copy = Snapshot().take(state)
    assert copy["ema"]["model.w"].tolist() == [0, 0]
    assert copy["ema.model"]["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "value",
    [lambda: 1, Path("x"), torch.Generator(), np.arange(3), np.arange(1), defaultdict(int, a=1)],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_cannot_be_saved_is_refused_by_path(value: Any) -> None:
    copy, refused = attempt({"kept": {"mine": {"x": value}}})
    if refused:
        assert refused.startswith(f"kept.mine.x is a {type(value).__name__}, which")
    else:  # or it is kept as it is
        found = copy["kept"]["mine"]["x"]
        assert type(found) is type(value)
        assert np.array_equal(found, value)


def test_an_object_that_is_added_later_is_refused_too() -> None:
    snapshot = Snapshot()
    snapshot.take({"kept": {"best": None}})
    with pytest.raises(CheckpointError, match=r"kept\.best"):
        snapshot.take({"kept": {"best": Path("x")}})


def test_an_ordered_state_becomes_a_plain_one() -> None:
    assert type(Snapshot().take({"a": OrderedDict(b=1)})["a"]) is dict
