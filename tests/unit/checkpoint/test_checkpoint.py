"""Checkpoints: what goes in comes out to the bit, and what is not whole is not used."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as lr

from samestep.checkpoint.export import export_checkpoint, pick
from samestep.checkpoint.files import Files, sha256_of
from samestep.checkpoint.format import (
    MANIFEST,
    MODEL,
    TRAINING,
    Best,
    Manifest,
    _digest,
    folder_name,
    read_model,
    read_training,
    verify_checkpoint,
    write_checkpoint,
)
from samestep.checkpoint.resume import (
    ResumePoint,
    find_resume_point,
    refuse_another_run,
    warn_of_other_bits,
)
from samestep.checkpoint.snapshot import Snapshot
from samestep.checkpoint.state import RunState
from samestep.checkpoint.store import CheckpointStore, list_checkpoints, newest_valid
from samestep.config import Config, load_config
from samestep.errors import CheckpointError

MANY = 100_000_000


def manifest(step: int = 4, **changes: Any) -> Manifest:
    said = Manifest(
        step=step,
        epoch=1,
        world=2,
        saved_at=1.7e9,
        metrics={"val_loss": 0.25},
        best=None,
        ended=None,
        config={"seed": 0},
        plan={"lanes": 8},
        versions={"samestep": "0.1.0"},
    )
    return replace(said, **changes)


def put(
    folder: Path,
    model: Mapping[str, Tensor] | None = None,
    training: Mapping[str, Any] | None = None,
    said: Manifest | None = None,
) -> Path:
    """A checkpoint on the disk."""
    said = said or manifest()
    path = folder / folder_name(said.step)
    model = {"weight": torch.arange(6.0).view(2, 3)} if model is None else model
    training = {"optimizers": [], "position": {"step": said.step}} if training is None else training
    write_checkpoint(Files(), path, model, training, said)
    return path


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(bits(left), bits(right))
    )


# -- the weights ----------------------------------------------------------------------------------

TYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def of_type(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits at all, NaNs with payloads among them."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel() * size
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize(
    "dtype",
    [
        *TYPES,
        pytest.param(torch.uint16),
        pytest.param(torch.uint32),
        pytest.param(torch.uint64),
    ],
    ids=str,
)
def test_a_tensor_of_any_type_and_shape_comes_back_to_the_bit(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    model = {
        "vector": of_type(dtype, 7),
        "number": of_type(dtype),
        "nothing": of_type(dtype, 0, 3),
        "turned": of_type(dtype, 3, 5).t(),
        "every second": of_type(dtype, 8)[::2],
        "images": of_type(dtype, 2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "also nothing": of_type(dtype, 0),
    }
    assert not model["images"].is_contiguous()
    folder = put(tmp_path, model)
    verify_checkpoint(folder)
    found = read_model(folder)
    assert found.keys() == model.keys()
    for name, tensor in model.items():
        assert same_bits(found[name], tensor), name


def test_types_of_all_widths_lie_beside_each_other(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = {f"{n}.{dtype}": of_type(dtype, n) for dtype in TYPES for n in (1, 3)}
    folder = put(tmp_path, model)
    found = safetensors.torch.load_file(folder / MODEL)
    assert all(same_bits(found[name], tensor) for name, tensor in model.items())
    # As the library itself would write it: every tensor starts where its type wants it.
    raw = (folder / MODEL).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        assert entry["data_offsets"][0] % model[name].element_size() == 0, name


def test_a_type_that_safetensors_has_not_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"wave is of type torch\.complex128"):
        put(tmp_path, {"wave": torch.zeros(2, dtype=torch.complex128)})


class Tied(nn.Module):
    """A language model's first and last matrix are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 3)
        self.last = nn.Linear(3, 5, bias=False)
        self.last.weight = self.first.weight


def state_of(model: nn.Module, *optimizers: Optimizer) -> RunState:
    return RunState([model], list(optimizers), [], {})


def test_tied_weights_are_written_once_and_load_into_both(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, other = Tied(), Tied()
    state = state_of(model)
    assert list(state.model_tensors()) == ["first.weight"]
    folder = put(tmp_path, state.model_tensors(), state.training())

    missing, unexpected = safetensors.torch.load_model(other, folder / MODEL)
    assert (list(missing), list(unexpected)) == ([], [])
    assert torch.equal(other.last.weight, model.first.weight)

    third = Tied()
    state_of(third).load(read_model(folder), read_training(folder))
    assert torch.equal(third.last.weight, model.first.weight)
    assert third.last.weight is third.first.weight


def test_tensors_of_nothing_are_not_taken_for_one(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("seen", torch.empty(0))
    model.register_buffer("known", torch.empty(0))
    state = state_of(model)
    assert {"seen", "known"} <= state.model_tensors().keys()
    folder = put(tmp_path, state.model_tensors(), state.training())
    state.load(read_model(folder), read_training(folder))
    safetensors.torch.load_model(model, folder / MODEL)


def test_the_weights_are_read_in_two_lines_without_samestep(tmp_path: Path) -> None:
    folder = put(tmp_path)
    lines = (
        "import json, safetensors.torch as s, sys\n"
        "print(json.dumps({k: v.tolist() for k, v in s.load_file(sys.argv[1]).items()}))"
    )
    read = subprocess.run(
        [sys.executable, "-c", f"{lines}\nassert 'samestep' not in sys.modules", folder / MODEL],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(read.stdout) == {"weight": [[0, 1, 2], [3, 4, 5]]}


# -- everything else ------------------------------------------------------------------------------


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
        np.float32(2.5),
        np.int64(2),
        np.bool_(True),
        pytest.param(np.float64(2.5)),
        pytest.param(np.str_("a")),
        pytest.param(Pair(1, 2)),
        pytest.param(Colour.RED),
        pytest.param(Names(["a"])),
        pytest.param({np.int64(3): 1}),
    ],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_what_can_be_saved_can_be_read_back(tmp_path: Path, value: Any) -> None:
    """Or is refused before it is written: not when the run wants to go on."""
    copy, refused = attempt({"kept": {"x": value}})
    if refused:
        assert "kept.x" in refused
    else:
        assert read_training(put(tmp_path, {}, copy))["kept"]["x"] == value


def test_a_number_of_numpy_becomes_a_plain_one() -> None:
    value = Snapshot().take({"x": np.float32(2.5)})["x"]
    assert (type(value), value) == (float, 2.5)


SCHEDULES: dict[str, Callable[[Optimizer], lr.LRScheduler]] = {
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 2, 6, 6], gamma=0.5),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingLR(o, 9)], [3]
    ),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.5, total_iters=4), lr.ExponentialLR(o, 0.9)]
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.2, step_size_up=3, mode="exp_range", gamma=0.9),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(tmp_path: Path, kind: str) -> None:
    def start() -> tuple[nn.Module, Optimizer, Any]:
        model = nn.Linear(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULES[kind](optimizer)

    def go_on(optimizer: Optimizer, schedule: Any, steps: range) -> list[float]:
        rates = []
        for step in steps:
            optimizer.step()
            schedule.step(*([1.0 + step] if kind == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model, optimizer, schedule = start()
    go_on(optimizer, schedule, range(4))
    state = RunState([model], [optimizer], [schedule], {})
    copy = Snapshot().take({"model": state.model_tensors(), "training": state.training()})
    folder = put(tmp_path, copy["model"], copy["training"])
    expected = go_on(optimizer, schedule, range(4, 12))
    assert len(set(expected)) > 1

    model, optimizer, schedule = start()
    RunState([model], [optimizer], [schedule], {}).load(read_model(folder), read_training(folder))
    assert go_on(optimizer, schedule, range(4, 12)) == expected


def test_a_schedule_with_a_lambda_in_its_state_is_refused_by_path() -> None:
    class Own(lr.LRScheduler):
        def __init__(self, optimizer: Optimizer) -> None:
            self.shape: Callable[[int], float] = lambda step: 0.5
            super().__init__(optimizer)

        def get_lr(self) -> list[float | Tensor]:
            return [self.shape(0)]

    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    state = {"training": {"schedules": [Own(optimizer).state_dict()]}}
    with pytest.raises(
        CheckpointError, match=r"^training\.schedules\.0\.shape is a function, which"
    ):
        Snapshot().take(state)


# -- the snapshot ---------------------------------------------------------------------------------


def test_a_snapshot_uses_its_buffers_again() -> None:
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


@pytest.mark.parametrize(
    "path",
    [
        "list", "dict", "tensor", "counter",
        pytest.param("set"),
    ],
)  # fmt: skip
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
    [
        lambda: 1,
        Path("x"),
        torch.Generator(),
        pytest.param(np.arange(3)),
        pytest.param(np.arange(1)),
        pytest.param(
            defaultdict(int, a=1),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_that_cannot_be_kept_is_refused_by_path(value: Any) -> None:
    copy, refused = attempt({"kept": {"mine": {"x": value}}})
    if refused:
        assert refused.startswith(f"kept.mine.x is a {type(value).__name__}, which")
    else:  # or it is kept as it is
        found = copy["kept"]["mine"]["x"]
        assert type(found) is type(value)
        assert np.array_equal(found, value)


def test_an_object_that_comes_later_is_refused_too() -> None:
    snapshot = Snapshot()
    snapshot.take({"kept": {"best": None}})
    with pytest.raises(CheckpointError, match=r"kept\.best"):
        snapshot.take({"kept": {"best": Path("x")}})


# -- bringing a state back ------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": lambda m: Adam(m.parameters(), lr=0.05),
    "AdamW amsgrad": lambda m: AdamW(m.parameters(), lr=0.05, amsgrad=True),
    "SGD": lambda m: SGD(m.parameters(), lr=0.05),
    "SGD momentum": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "groups": lambda m: AdamW(
        [{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(m.parameters())]
    ),
}


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        kind = next(model.parameters()).dtype
        optimizer.zero_grad()
        model(torch.randn(8, 3, dtype=kind)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_training_that_goes_on_is_the_same_to_the_bit(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(7)
    model = small_model(dtype)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(3))
    state = state_of(model, optimizer)
    copy = Snapshot().take({"model": state.model_tensors(), "training": state.training()})
    folder = put(tmp_path, copy["model"], copy["training"])
    train(model, optimizer, range(3, 6))

    other = small_model(dtype)
    again = OPTIMIZERS[kind](other)
    state_of(other, again).load(read_model(folder), read_training(folder))
    train(other, again, range(3, 6))
    for (name, left), right in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        assert same_bits(left, right), name


@pytest.mark.parametrize("kind", ["Adam", "AdamW amsgrad", "SGD momentum"])
def test_float32_moments_of_bf16_weights_stay_float32(tmp_path: Path, kind: str) -> None:
    model = small_model(torch.bfloat16)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, range(1))
    fine: dict[int, dict[str, Tensor]] = {}
    for number, entries in enumerate(optimizer.state.values()):
        for key in [k for k, v in entries.items() if isinstance(v, Tensor) and v.dim()]:
            entries[key] = entries[key].float() + 2.0**-20  # more digits than bf16 has
            fine.setdefault(number, {})[key] = entries[key]
    assert fine
    state = state_of(model, optimizer)
    folder = put(tmp_path, state.model_tensors(), state.training())

    other = small_model(torch.bfloat16)
    again = OPTIMIZERS[kind](other)
    state_of(other, again).load(read_model(folder), read_training(folder))
    for number, entries in enumerate(again.state.values()):
        for key, value in fine[number].items():
            assert same_bits(entries[key], value), key
        for key, value in entries.items():
            if key == "step":
                assert value.dtype == torch.float32


def test_what_was_kept_and_other_modules_come_back(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(1, 3)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1)
    state = RunState([model, other], [optimizer], [], {"ema": nn.Linear(1, 1)})
    folder = put(tmp_path, state.model_tensors(), state.training())
    expected = other.weight.detach().clone()
    nn.init.zeros_(other.weight)
    state.load(read_model(folder), read_training(folder))
    assert torch.equal(other.weight, expected)
    assert list(read_training(folder)["kept"]) == ["ema"]


def test_every_name_and_shape_that_does_not_fit_is_told_at_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 1), "c": nn.Linear(1, 1)})
    was = nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(3, 1).double(), "d": nn.Linear(1, 1)})
    optimizer = SGD(was.parameters(), lr=0.1)
    saved = RunState([was, nn.Linear(1, 1)], [optimizer], [lr.ConstantLR(optimizer)], {})
    with pytest.raises(CheckpointError) as caught:
        state_of(model).load(saved.model_tensors(), saved.training())
    assert str(caught.value).splitlines() == [
        "the checkpoint does not fit this task's objects:",
        "  - c.bias is not in the checkpoint",
        "  - c.weight is not in the checkpoint",
        "  - d.bias is only in the checkpoint",
        "  - d.weight is only in the checkpoint",
        "  - a.bias is (3,) float32, in the checkpoint (4,) float32",
        "  - a.weight is (3, 2) float32, in the checkpoint (4, 2) float32",
        "  - b.bias is (1,) float32, in the checkpoint (1,) float64",
        "  - b.weight is (1, 3) float32, in the checkpoint (1, 3) float64",
        "  - ...",
    ]


def test_another_number_of_objects_is_told() -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    saved = RunState([model, nn.Linear(1, 1)], [optimizer], [lr.ConstantLR(optimizer)], {})
    with pytest.raises(CheckpointError) as caught:
        state_of(model).load(saved.model_tensors(), saved.training())
    assert str(caught.value).splitlines()[1:] == [
        "  - modules besides the model: 0 here, 1 in the checkpoint",
        "  - optimizers: 0 here, 1 in the checkpoint",
        "  - schedules: 0 here, 1 in the checkpoint",
    ]


def test_nothing_changes_when_the_model_does_not_fit() -> None:
    layer = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    saved = state_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(CheckpointError):
        state_of(nn.Sequential(layer)).load(saved.model_tensors(), saved.training())
    assert torch.equal(layer.weight, before)


def test_an_optimizer_with_other_groups_is_told() -> None:
    model = nn.Linear(2, 2)
    saved = state_of(model, SGD(model.parameters(), lr=0.1))
    here = state_of(model, SGD([{"params": [p]} for p in model.parameters()], lr=0.1))
    with pytest.raises(CheckpointError, match="the state of an optimizer does not fit this SGD"):
        here.load(saved.model_tensors(), saved.training())


class Extra(nn.Module):
    """Has a state that is no tensor, as torchmetrics and quantised layers do."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.note = note

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_a_modules_extra_state_comes_back(tmp_path: Path) -> None:
    state = state_of(Extra("saved"))
    folder = put(tmp_path, state.model_tensors(), state.training())
    other = Extra("new")
    state_of(other).load(read_model(folder), read_training(folder))
    assert other.note == "saved"


def test_an_extra_state_that_is_missing_is_told() -> None:
    saved = state_of(Extra("saved"))
    training = {**saved.training(), "model": {}}
    with pytest.raises(CheckpointError, match="_extra_state is not in the checkpoint"):
        state_of(Extra("new")).load(saved.model_tensors(), training)


# -- damage ---------------------------------------------------------------------------------------


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    said = manifest(
        metrics={"val_loss": 0.1 + 0.2, "nan": float("inf")},
        best=Best(2, "val_loss", 1 / 3),
        ended="done",
        config={"params": {"größe": [1, 2.5, None, True]}},
    )
    found = verify_checkpoint(put(tmp_path, said=said))
    assert set(found.files) == {MODEL, TRAINING}
    assert replace(found, files={}) == said


def test_metrics_by_number_come_back_too(tmp_path: Path) -> None:
    folder = put(tmp_path, said=manifest(metrics={"accuracy by class": {9: 0.5, 10: 0.25}}))
    assert verify_checkpoint(folder).metrics == {"accuracy by class": {"9": 0.5, "10": 0.25}}


def test_any_changed_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    folder = put(tmp_path, said=manifest(best=Best(2, "val_loss", 0.5)))
    path = folder / MANIFEST
    said, text = Manifest.read(folder), path.read_bytes()
    noticed = 0
    for place in range(len(text)):
        for byte in {text[place] ^ 1, ord("0")} - {text[place]}:
            path.write_bytes(text[:place] + bytes([byte]) + text[place + 1 :])
            try:
                assert Manifest.read(folder) == said, place  # a space may become another
            except CheckpointError:
                noticed += 1
    assert noticed >= len(text)


@pytest.mark.parametrize("length", [0, 1, 40, -1])
def test_a_cut_manifest_is_noticed(tmp_path: Path, length: int) -> None:
    folder = put(tmp_path)
    text = (folder / MANIFEST).read_bytes()
    (folder / MANIFEST).write_bytes(text[:length])
    with pytest.raises(CheckpointError, match=MANIFEST):
        verify_checkpoint(folder)


def rewritten(folder: Path, **changes: Any) -> None:
    """The manifest with other values and a checksum of its own that is right."""
    document = json.loads((folder / MANIFEST).read_text())
    del document["sha256"]
    document |= changes
    text = json.dumps({"sha256": _digest(document), **document})
    (folder / MANIFEST).write_text(text)


def reseal(folder: Path) -> None:
    """The manifest with right checksums for whatever the files hold now."""
    names = (MODEL, TRAINING)
    rewritten(
        folder, files={n: [sha256_of(folder / n), (folder / n).stat().st_size] for n in names}
    )


def test_another_format_is_refused_with_its_number(tmp_path: Path) -> None:
    folder = put(tmp_path)
    rewritten(folder, format=2)
    with pytest.raises(CheckpointError, match="it is of format 2, and this samestep reads 1"):
        verify_checkpoint(folder)


def test_a_manifest_with_other_keys_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path)
    rewritten(folder, colour="red")
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        verify_checkpoint(folder)


def missing(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 1)


def longer(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.write(b"x")

    return act


def flipped(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)

    return act


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (missing(MANIFEST), "it has no manifest.json"),
    (missing(MODEL), "model.safetensors cannot be read: No such file"),
    (missing(TRAINING), "training.pt cannot be read: No such file"),
    (cut(MODEL), r"model.safetensors has \d+ bytes and was written with \d+"),
    (cut(TRAINING), r"training.pt has \d+ bytes and was written with \d+"),
    (longer(MODEL), r"model.safetensors has \d+ bytes and was written with \d+"),
    (flipped(MODEL), r"model.safetensors is not what was written \(checksum\)"),
    (flipped(TRAINING), r"training.pt is not what was written \(checksum\)"),
]
DAMAGED = pytest.mark.parametrize(
    ("damage", "words"),
    DAMAGE,
    ids=[words.split(" ")[0] + str(n) for n, (_, words) in enumerate(DAMAGE)],
)


@DAMAGED
def test_damage_is_found_and_named(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = put(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=words):
        verify_checkpoint(folder)


@DAMAGED
def test_the_newest_whole_one_is_used_and_others_are_named(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    for step in (2, 4, 6):
        put(tmp_path, said=manifest(step))
    damage(tmp_path / folder_name(6))
    said: list[str] = []
    found = newest_valid(tmp_path, said.append)
    assert found is not None
    assert (found.step, found.wrong) == (4, "")
    assert found.manifest is not None
    assert found.manifest.step == 4
    [line] = said
    assert line.startswith(f"checkpoint {tmp_path / folder_name(6)} is not used: ")

    listed = list_checkpoints(tmp_path, checksums=True)
    assert [(item.step, bool(item.wrong)) for item in listed] == [(2, False), (4, False), (6, True)]
    assert listed[-1].manifest is None


def test_no_whole_checkpoint_among_some_is_an_error_and_all_are_named(tmp_path: Path) -> None:
    for step in (2, 4):
        (put(tmp_path, said=manifest(step)) / MODEL).unlink()
    said: list[str] = []
    with pytest.raises(CheckpointError, match=r"none of the 2 .* resume=never"):
        newest_valid(tmp_path, said.append)
    assert [folder_name(4) in said[0], folder_name(2) in said[1], len(said)] == [True, True, 2]
    assert newest_valid(tmp_path / "not there", said.append) is None


def test_only_directories_of_ours_are_listed(tmp_path: Path) -> None:
    put(tmp_path, said=manifest(4))
    put(tmp_path, said=manifest(6)).rename(tmp_path / "step-00000006.partial")
    for name in ("step-best", "step-", "epoch-00000001", "step-0000002x"):
        (tmp_path / name).mkdir()
    (tmp_path / folder_name(8)).write_text("a file")
    assert [item.folder.name for item in list_checkpoints(tmp_path, checksums=True)] == [
        folder_name(4)
    ]


def test_a_hundred_million_steps_come_after_fewer(tmp_path: Path) -> None:
    for step in (MANY - 1, MANY):
        put(tmp_path, said=manifest(step))
    found = newest_valid(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == MANY


# -- files that want to run code ------------------------------------------------------------------


class Evil:
    """An object that runs a command when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = (call, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def poisons(touched: Path) -> dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]]:
    """How each is written, and how somebody careless would read it."""
    command = Evil(os.system, f"touch {touched}")
    code = Evil(exec, f"open({str(touched)!r}, 'w').close()")
    good = {"optimizers": [], "position": {"step": 4}}

    def careless(path: Path) -> object:
        return torch.load(path, weights_only=False)

    def very_careless(path: Path) -> object:
        return pickle.loads(path.read_bytes())

    return {
        "zip": (lambda path: torch.save(command, path), careless),
        "beside good keys": (
            lambda path: torch.save({**good, "kept": {"x": code}}, path),
            careless,
        ),
        "old format": (
            lambda path: torch.save(code, path, _use_new_zipfile_serialization=False),
            careless,
        ),
        "plain pickle": (lambda path: path.write_bytes(pickle.dumps(command)), very_careless),
        "text pickle": (lambda path: path.write_bytes(pickle.dumps(code, 0)), very_careless),
    }


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", list(poisons(Path())))
def test_a_file_that_wants_to_run_code_is_refused(tmp_path: Path, kind: str) -> None:
    touched = tmp_path / "touched"
    write_poison, careless = poisons(touched)[kind]
    folder = put(tmp_path)
    write_poison(folder / TRAINING)
    reseal(folder)
    verify_checkpoint(folder)  # every checksum is right
    with pytest.raises(CheckpointError, match="cannot be read without running code from it"):
        read_training(folder)
    assert not touched.exists()
    careless(folder / TRAINING)
    assert touched.exists()  # so there was something to refuse


def test_a_whole_object_instead_of_its_state_is_refused(tmp_path: Path) -> None:
    folder = put(tmp_path)
    torch.save(nn.Linear(1, 1), folder / TRAINING)
    with pytest.raises(CheckpointError, match="cannot be read without running code from it"):
        read_training(folder)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize(
    "content",
    [
        b"garbage", b"\0" * 100, b"PK\x03\x04" + b"x" * 50, pickle.dumps({"a": 1}),
        b"", b"\x80\x02", b"\x80\x02.",
    ],
)  # fmt: skip
def test_a_training_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = put(tmp_path)
    (folder / TRAINING).write_bytes(content)
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"training\.pt cannot be read"):
        read_training(folder)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 16, pickle.dumps({"a": 1})])
def test_a_model_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = put(tmp_path)
    (folder / MODEL).write_bytes(content)
    reseal(folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        read_model(folder)


# -- thinning out ---------------------------------------------------------------------------------


def store_at(folder: Path, keep_last: int) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep_last)


def write(store: CheckpointStore, step: int, best: int | None = None) -> None:
    said = manifest(step, best=best and Best(best, "val_loss", 0.5))
    store.write_now({"weight": torch.full((2,), float(step))}, {"optimizers": []}, said)


def steps_in(folder: Path) -> list[int]:
    return [item.step for item in list_checkpoints(folder / "checkpoints", checksums=True)]


@pytest.mark.parametrize(
    ("keep_last", "saves", "left"),
    [
        (1, [(2, None), (4, None)], [4]),
        (2, [(2, None), (4, None), (6, None)], [4, 6]),
        (2, [(2, 2), (4, 2), (6, 2), (8, 2)], [2, 6, 8]),
        (1, [(2, 2), (4, 4), (6, 4)], [4, 6]),
        (1, [(2, 2), (4, 4), (6, 6)], [6]),
        (5, [(2, None), (4, None)], [2, 4]),
        (1, [(2, None), (4, 3)], [4]),  # a best one that is no longer there
    ],
)
def test_the_last_ones_and_the_best_stay(
    tmp_path: Path, keep_last: int, saves: list[tuple[int, int | None]], left: list[int]
) -> None:
    store = store_at(tmp_path, keep_last)
    for step, best in saves:
        write(store, step, best)
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize(
    ("rule", "keep_best", "best", "left"),
    [
        ({"metric": "f1", "mode": "max"}, 1, None, [8, 12]),
        ({"metric": "f1", "mode": "max"}, 2, None, [4, 8, 12]),
        ({"metric": "f1", "mode": "max"}, 3, None, [2, 4, 8, 12]),
        ({"metric": "f1", "mode": "min"}, 2, None, [2, 6, 12]),
        ({"metric": "f1", "mode": "max"}, 2, 6, [6, 8, 12]),  # min_delta can make it so
        ({"metric": "f1", "mode": "max"}, 9, None, [2, 4, 6, 8, 12]),
        ({"metric": "other", "mode": "max"}, 9, None, [12]),
        ({}, 9, None, [12]),
    ],
)
def test_the_best_ones_by_what_their_own_weights_were_measured_at(
    tmp_path: Path, rule: dict[str, str], keep_best: int, best: int | None, left: list[int]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 1, keep_best=keep_best)
    values = {2: 0.3, 4: 0.5, 6: 0.1, 8: 0.9, 10: float("nan"), 12: 0.99}
    for step, value in values.items():
        said = manifest(
            step,
            metrics={"f1": value},
            measured=step if step < 12 else 8,  # the last one was not measured itself
            config={"best": rule} if rule else {},
            best=None if best is None or step < best else Best(best, "f1", 0.0),
        )
        store.write_now({"weight": torch.zeros(2)}, {"optimizers": []}, said)
    assert steps_in(tmp_path) == left


def test_the_one_just_written_stays_among_later_ones(tmp_path: Path) -> None:
    write(store_at(tmp_path, 9), 6)
    write(store_at(tmp_path, 9), 8)
    write(store_at(tmp_path, 9), 2)
    write(store_at(tmp_path, 1), 4)
    assert steps_in(tmp_path) == [4, 6, 8]


def test_damaged_ones_do_not_count_as_the_last_ones(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write(store_at(tmp_path, 9), step)
    (tmp_path / "checkpoints" / folder_name(6) / MODEL).unlink()
    write(store_at(tmp_path, 2), 8)
    assert [item.step for item in list_checkpoints(tmp_path / "checkpoints", checksums=True)
            if not item.wrong] == [4, 8]  # fmt: skip


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    store = store_at(tmp_path, 1)
    write(store, 2)
    mine = tmp_path / "checkpoints" / "notes.txt"
    mine.write_text("mine")
    (tmp_path / "checkpoints" / "step-mine").mkdir()
    write(store, 4)
    assert mine.exists()
    assert (tmp_path / "checkpoints" / "step-mine").exists()


@pytest.mark.parametrize(("best", "exported"), [(None, 4.0), (2, 2.0), (4, 4.0), (3, 2.0)])
def test_the_best_or_last_weights_lie_beside_the_checkpoints(
    tmp_path: Path, best: int | None, exported: float
) -> None:
    store = store_at(tmp_path, 2)
    write(store, 2, best and 2)
    write(store, 4, best)
    weights = safetensors.torch.load_file(tmp_path / MODEL)["weight"]
    assert weights.tolist() == [exported, exported]


def test_exported_weights_outlive_their_checkpoint(tmp_path: Path) -> None:
    store = store_at(tmp_path, 1)
    write(store, 2, 2)
    store.write_now({"weight": torch.zeros(1)}, {}, manifest(4, best=Best(3, "val_loss", 0.5)))
    assert steps_in(tmp_path) == [4]
    assert safetensors.torch.load_file(tmp_path / MODEL)["weight"].tolist() == [2.0, 2.0]


# -- for other projects ---------------------------------------------------------------------------


def run_with(tmp_path: Path, *optimizers: Optimizer, model: nn.Module) -> Path:
    state = state_of(model, *optimizers)
    best = Best(2, "val_loss", 0.5)
    for step in (2, 4):
        said = manifest(step, best=best, epoch=step // 2)
        put(tmp_path / "checkpoints", state.model_tensors(), state.training(), said)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    return tmp_path


def test_an_export_has_the_keys_that_others_read(tmp_path: Path) -> None:
    model = small_model()
    optimizer = Adam(model.parameters(), lr=0.05)
    train(model, optimizer, range(2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    run = run_with(tmp_path, optimizer, model=model)
    said = export_checkpoint(run, "best", tmp_path / "new" / "model.pt")
    assert said.step == 2
    found = torch.load(tmp_path / "new" / "model.pt", weights_only=True)
    assert list(found) == ["model_state_dict", "optimizer_state_dict", "epoch"]
    assert found["epoch"] == 1
    assert found["model_state_dict"].keys() == expected.keys()
    assert all(same_bits(found["model_state_dict"][name], expected[name]) for name in expected)
    other = small_model()
    other.load_state_dict(found["model_state_dict"])
    Adam(other.parameters()).load_state_dict(found["optimizer_state_dict"])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.pt"]


def test_several_optimizers_are_exported_as_a_list(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    pair = [SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.2)]
    export_checkpoint(run_with(tmp_path, *pair, model=model), "last", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)["optimizer_state_dict"]
    assert [state["param_groups"][0]["lr"] for state in found] == [0.1, 0.2]


@pytest.mark.parametrize("model", [Tied(), Extra("saved")], ids=["tied weights", "extra state"])
def test_an_export_loads_strictly_into_the_model_it_came_from(
    tmp_path: Path, model: nn.Module
) -> None:
    run = run_with(tmp_path, SGD(model.parameters(), lr=0.1), model=model)
    export_checkpoint(run, "last", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    model.load_state_dict(found["model_state_dict"])


@pytest.mark.parametrize(("which", "step"), [("best", 2), ("last", 4), ("2", 2), ("4", 4)])
def test_a_checkpoint_is_picked_by_name_or_step(tmp_path: Path, which: str, step: int) -> None:
    assert pick(run_with(tmp_path, model=nn.Linear(1, 1)), which).step == step


def test_without_a_best_one_the_last_is_the_best(tmp_path: Path) -> None:
    put(tmp_path / "checkpoints", said=manifest(4))
    put(tmp_path / "checkpoints", said=manifest(6))
    assert pick(tmp_path, "best").step == 6


def test_an_unknown_checkpoint_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    run = run_with(tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"'3': .* has best, last and the steps 2, 4$"):
        pick(run, "3")
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        pick(tmp_path / "elsewhere", "last")


def test_damage_is_told_before_anything_is_exported(tmp_path: Path) -> None:
    run = run_with(tmp_path, model=nn.Linear(1, 1))
    folder = run / "checkpoints" / folder_name(4)
    flipped(MODEL)(folder)
    with pytest.raises(CheckpointError, match=rf"{folder}: model.safetensors is not what"):
        export_checkpoint(run, "last", tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_an_export_to_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    run = run_with(tmp_path, model=nn.Linear(1, 1))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"model\.pt could not be written"):
        export_checkpoint(run, "last", tmp_path / "file" / "model.pt")


# -- going on -------------------------------------------------------------------------------------

GOOD = {"task": "task.py:Good", "epochs": 3, "global_batch": 8, "params": {"width": 4}}
PLAN = {"global_batch": 8, "lanes": 8, "samples": 100}


def config(*overrides: str) -> Config:
    return load_config(GOOD, overrides)


def point(folder: Path = Path("step-00000004"), saved: Config | None = None) -> ResumePoint:
    document = (saved or config()).model_dump(mode="json")
    return ResumePoint(folder, manifest(config=document, plan=PLAN))


DIFFERENCES = [
    ("seed=1", {}, "seed was 0, is 1"),
    ("epochs=4", {}, "epochs was 3, is 4"),
    ("task=task.py:Other", {}, "task was task.py:Good, is task.py:Other"),
    ("params.width=5", {}, "params was {'width': 4}, is {'width': 5}"),
    ("same=rounding", {}, "same was bits, is rounding"),
    ("drop_last=true", {}, "drop_last was False, is True"),
    ("precision=bf16", {}, "precision was fp32, is bf16"),
    ("clip.norm=1.0", {}, "clip.norm was not set, is 1.0"),
    ("on_nonfinite=skip", {}, "on_nonfinite was stop, is skip"),
    ("steps_per_epoch=9", {}, "steps_per_epoch was not set, is 9"),
    (None, {"global_batch": 16}, "global_batch was 8, is 16"),
    (None, {"lanes": 4}, "lanes was 8, is 4"),
    (None, {"samples": 101}, "samples was 100, is 101"),
]


@pytest.mark.parametrize(
    ("override", "plan", "words"), DIFFERENCES, ids=[d[2] for d in DIFFERENCES]
)
def test_a_config_of_another_run_is_refused_unless_allowed(
    override: str | None, plan: dict[str, int], words: str
) -> None:
    changes = [] if override is None else [override]
    with pytest.raises(CheckpointError) as caught:
        refuse_another_run(config(*changes), {**PLAN, **plan}, point())
    key = words.split(" ")[0].split(".")[0]
    assert f"\n  - {words}\n" in str(caught.value)
    assert str(caught.value).count("\n  - ") == 1
    assert f"resume.allow=[{key}]" in str(caught.value)
    refuse_another_run(config(*changes, f"resume.allow=[{key}]"), {**PLAN, **plan}, point())


def test_every_difference_is_named_and_the_allowed_ones_are_not() -> None:
    now = config("seed=1", "clip.norm=2", "precision=bf16", "resume.allow=[clip]")
    with pytest.raises(CheckpointError) as caught:
        refuse_another_run(now, {**PLAN, "lanes": 4}, point(Path("runs/a/step-00000004")))
    text = str(caught.value)
    assert text.startswith("runs/a/step-00000004 was written by another run")
    assert [line for line in text.splitlines() if line.startswith("  - ")] == [
        "  - seed was 0, is 1",
        "  - precision was fp32, is bf16",
        "  - lanes was 8, is 4",
    ]
    assert "resume.allow=[seed, precision, lanes]" in text


@pytest.mark.parametrize(
    "override",
    [
        "name=other", "run_dir=elsewhere", "log_every=3", "loader.workers=2",
        "checkpoint.every_steps=5", "distributed.timeout=9", "task=../there/task.py:Good",
        "evaluation.mode=rank0", "resume.checkpoint=auto",
    ],
)  # fmt: skip
def test_what_does_not_shape_the_run_may_change(override: str) -> None:
    refuse_another_run(config(override), PLAN, point())


def test_another_number_of_ranks_is_the_same_run() -> None:
    refuse_another_run(config(), {**PLAN, "world": 4, "lanes_per_rank": [2, 2, 2, 2]}, point())


@pytest.mark.parametrize(
    ("plan", "versions", "words"),
    [
        ({}, {}, []),
        ({"device": "cpu"}, {"torch": torch.__version__}, []),
        ({"device": "cuda"}, {}, ["device was cuda, is cpu"]),
        ({"threads_per_rank": 2}, {}, ["threads_per_rank was 2, is 1"]),
        ({"device": "cuda"}, {"torch": "1.0"}, ["device was cuda, is cpu", "torch was 1.0, is "]),
    ],
)
def test_what_may_change_the_last_bit_is_told_and_is_no_error(
    plan: dict[str, Any], versions: dict[str, str], words: list[str]
) -> None:
    said: list[str] = []
    saved = ResumePoint(Path(), manifest(plan=plan, versions={**versions}))
    warn_of_other_bits({"device": "cpu", "threads_per_rank": 1}, saved, said.append)
    assert len(said) == bool(words)
    assert all(word in said[0] for word in words)


def test_a_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert find_resume_point(config(), tmp_path, False, pytest.fail) is None
    for step in (2, 4):
        put(tmp_path / "checkpoints", said=manifest(step))
    found = find_resume_point(config(), tmp_path, False, pytest.fail)
    assert found is not None
    assert found.folder == tmp_path / "checkpoints" / folder_name(4)
    anew = config("resume=never")
    assert find_resume_point(anew, tmp_path, False, pytest.fail) is None
    again = find_resume_point(anew, tmp_path, True, pytest.fail)
    assert again is not None, "a restart of the launch that began it goes on"
    assert again.manifest.step == 4


@pytest.mark.parametrize("inside", ["", "checkpoints/step-00000002"])
def test_a_run_goes_on_from_a_path(tmp_path: Path, inside: str) -> None:
    other = tmp_path / "other"
    put(other / "checkpoints", said=manifest(2))
    asked = config(f"resume.checkpoint={other / inside}")
    found = find_resume_point(asked, tmp_path / "mine", False, pytest.fail)
    assert found is not None
    assert found.folder == other / "checkpoints" / folder_name(2)

    # Interrupted and started again, it goes on from its own.
    mine = manifest(4, config=asked.model_dump(mode="json"))
    put(tmp_path / "mine" / "checkpoints", said=mine)
    found = find_resume_point(asked, tmp_path / "mine", False, pytest.fail)
    assert found is not None
    assert found.folder == tmp_path / "mine" / "checkpoints" / folder_name(4)

    # What another start has left there is not its own.
    put(tmp_path / "mine" / "checkpoints", said=manifest(6))
    found = find_resume_point(asked, tmp_path / "mine", False, pytest.fail)
    assert found is not None
    assert found.manifest.step == 2


def test_a_path_without_a_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    damaged = put(tmp_path / "checkpoints")
    flipped(TRAINING)(damaged)
    said: list[str] = []
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoint\(s\) in .* can be used"):
        find_resume_point(
            config(f"resume.checkpoint={tmp_path}"), tmp_path / "mine", False, said.append
        )
    assert len(said) == 1
    with pytest.raises(CheckpointError, match=r"is not a whole checkpoint: .*\(checksum\)"):
        find_resume_point(
            config(f"resume.checkpoint={damaged}"), tmp_path / "mine", False, said.append
        )
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json"):
        find_resume_point(
            config("resume.checkpoint=nowhere"), tmp_path / "mine", False, said.append
        )


def test_an_ordered_state_becomes_a_plain_one() -> None:
    assert type(Snapshot().take({"a": OrderedDict(b=1)})["a"]) is dict


def test_a_path_is_gone_on_from_though_the_own_checkpoints_are_damaged(tmp_path: Path) -> None:
    good = put(tmp_path / "elsewhere")
    (put(tmp_path / "run" / "checkpoints") / MODEL).unlink()
    asked = config(f"resume.checkpoint={good}")
    found = find_resume_point(asked, tmp_path / "run", False, lambda line: None)
    assert found is not None
    assert found.folder == good
