"""Checkpoints in parts: each rank writes what it owns, and the whole appears once all have written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from samestep.checkpoint.files import Files
from samestep.checkpoint.format import read_model, read_training, write_part
from samestep.checkpoint.listing import newest_valid
from samestep.checkpoint.manifest import verify_checkpoint
from samestep.checkpoint.parts import Part, merged
from samestep.checkpoint.store import CheckpointStore
from samestep.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import manifest

WORLD, STEP = 3, 4
_OPERATIONS = 6
"""Of another rank than 0 in a save: two files made and synced, a receipt made and renamed."""


def _model(rank: int) -> dict[str, torch.Tensor]:
    return {f"layer{rank}.weight": torch.full((2, rank + 1), float(rank))}


def _training(rank: int) -> dict[str, Any]:
    state = {rank: {"exp_avg": torch.full((3,), rank + 0.5), "step": torch.tensor(7.0)}}
    if rank == 0:
        groups = [{"params": list(range(WORLD)), "lr": 0.1}]
        rest = {
            "model": {},
            "shared": {},
            "schedules": [],
            "kept": {"ema": {"model": {}, "updates": 2}},
        }
        return {"optimizers": [{"state": state, "param_groups": groups}], "modules": [{}], **rest}
    kept = {"ema": {"model": {f"layer{rank}.weight": torch.ones(1)}}}
    return {
        "optimizers": [{"state": state}],
        "modules": [{f"head{rank}": torch.ones(1)}],
        "kept": kept,
    }


def _stores(folder: Path, files: dict[int, Files] | None = None) -> list[CheckpointStore]:
    folder.mkdir(exist_ok=True)
    return [
        CheckpointStore(folder / "checkpoints", 2, (files or {}).get(rank)) for rank in range(WORLD)
    ]


def _begin(stores: list[CheckpointStore], step: int, ranks: range, splits: bool = True) -> None:
    stores[0].begin_parts(step)
    for rank in ranks:
        model = _model(rank) if splits or rank == 0 else {}
        part = Part(rank, WORLD, splits)
        stores[rank].write(model, _training(rank), manifest(step), part)


@pytest.mark.parametrize("splits", [True, False], ids=["weights", "optimizer"])
def test_all_parts_are_one_checkpoint(tmp_path: Path, splits: bool) -> None:
    stores = _stores(tmp_path)
    _begin(stores, STEP, range(WORLD), splits)
    for store in stores:
        store.wait()
    found = newest_valid(tmp_path / "checkpoints", print)
    assert found is not None
    assert found.step == STEP
    assert set(verify_checkpoint(found.folder).files) == {
        path.name for path in found.folder.iterdir() if path.name != "manifest.json"
    }, "no receipt stays"
    training = read_training(found.folder)
    assert sorted(training["optimizers"][0]["state"]) == [0, 1, 2]
    assert training["optimizers"][0]["state"][2]["exp_avg"].tolist() == [2.5] * 3
    assert training["optimizers"][0]["param_groups"][0]["lr"] == 0.1
    assert training["kept"]["ema"]["updates"] == 2
    assert sorted(training["kept"]["ema"]["model"]) == ["layer1.weight", "layer2.weight"]
    assert sorted(training["modules"][0]) == ["head1", "head2"]
    expected = {name for rank in range(WORLD if splits else 1) for name in _model(rank)}
    assert read_model(found.folder).keys() == expected
    assert load_file(tmp_path / "model.safetensors").keys() == expected, "beside it, in one file"
    if splits:
        index = json.loads((found.folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"]["layer1.weight"] == "model-00002-of-00003.safetensors"
        assert load_file(found.folder / "model-00002-of-00003.safetensors").keys() == {
            "layer1.weight"
        }


def test_there_is_no_checkpoint_before_the_last_part(tmp_path: Path) -> None:
    stores = _stores(tmp_path)
    _begin(stores, STEP, range(WORLD - 1))
    stores[1].wait()
    assert newest_valid(tmp_path / "checkpoints", print) is None
    late = Part(WORLD - 1, WORLD, True)
    write_part(Files(), stores[0].partial(STEP), _model(2), _training(2), late)
    stores[0].wait()
    assert newest_valid(tmp_path / "checkpoints", print) is not None


def test_a_rank_that_is_gone_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    stores = _stores(tmp_path)
    _begin(stores, STEP, range(WORLD))
    for store in stores:
        store.wait()
    _begin(stores, STEP + 1, range(WORLD - 1))
    stores[0].finish(seconds=0.05)
    stores[0].wait()  # nothing is wrong with this rank
    found = newest_valid(tmp_path / "checkpoints", print)
    assert found is not None
    assert found.step == STEP
    again = _stores(tmp_path)
    _begin(again, STEP + 1, range(WORLD))
    again[0].wait()
    found = newest_valid(tmp_path / "checkpoints", print)
    assert found is not None
    assert found.step == STEP + 1
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


class _Full(Files):
    """A disk without space for files of weights."""

    def open_new(self, path: Path) -> Any:
        if path.name.startswith("model-"):
            raise OSError(28, os.strerror(28))
        return super().open_new(path)


def test_a_part_that_cannot_be_written_is_an_error_of_both(tmp_path: Path) -> None:
    stores = _stores(tmp_path, {1: _Full()})
    _begin(stores, STEP, range(WORLD))
    with pytest.raises(CheckpointError, match=r"part 2 of 3: No space left"):
        stores[0].wait()
    with pytest.raises(CheckpointError, match="No space left"):
        stores[1].wait()
    assert newest_valid(tmp_path / "checkpoints", print) is None


@pytest.mark.parametrize("killed", range(_OPERATIONS + 1))
def test_a_kill_at_any_file_operation_loses_no_checkpoint(tmp_path: Path, killed: int) -> None:
    """Of rank 1's: its operations end with the one of this number, as if the process were gone."""
    stores = _stores(tmp_path)
    _begin(stores, STEP, range(WORLD))
    for store in stores:
        store.wait()
    dying = _stores(tmp_path, {1: _Dies(killed)})
    _begin(dying, STEP + 1, range(WORLD))
    dying[0].finish(seconds=0.3)
    found = newest_valid(tmp_path / "checkpoints", print)
    assert found is not None
    assert found.step == (STEP if killed < _OPERATIONS else STEP + 1)
    read_training(found.folder)


class _Dies(Files):
    """File operations that end with one of them: what is written stays as it is."""

    def __init__(self, after: int) -> None:
        self._left = after

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise SystemExit

    def open_new(self, path: Path) -> Any:
        self._count()
        return super().open_new(path)

    def sync(self, path: Path) -> None:
        self._count()
        super().sync(path)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)


def test_states_are_merged_by_key_and_by_place() -> None:
    whole = {"a": [{"x": 1}, {"y": 2}], "b": 3, "c": {"d": 4}}
    part = {"a": [{"z": 5}, {"y": 6}], "b": 7, "c": {"e": 8}, "f": 9}
    assert merged(whole, part) == {
        "a": [{"x": 1, "z": 5}, {"y": 2}], "b": 3, "c": {"d": 4, "e": 8}, "f": 9,
    }  # fmt: skip
