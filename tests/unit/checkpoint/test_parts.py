"""Checkpoints in parts: each rank writes what it owns, and the whole appears once all have written."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from samestep.checkpoint.files import Files
from samestep.checkpoint.format import read_model, read_training, write_part
from samestep.checkpoint.listing import newest_valid
from samestep.checkpoint.manifest import verify_checkpoint
from samestep.checkpoint.parts import Part, Patience, merged
from samestep.checkpoint.store import CheckpointStore
from samestep.errors import CheckpointError, PeerLost
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
        rest = {"model": {}, "shared": {}, "schedules": [], "kept": {"ema": {"model": {}, "updates": 2}}}
        return {"optimizers": [{"state": state, "param_groups": groups}], "modules": [{}], **rest}
    kept = {"ema": {"model": {f"layer{rank}.weight": torch.ones(1)}}}
    return {"optimizers": [{"state": state}], "modules": [{f"head{rank}": torch.ones(1)}], "kept": kept}


def _stores(
    folder: Path, files: dict[int, Files] | None = None, patience: Patience | None = None
) -> list[CheckpointStore]:
    folder.mkdir(exist_ok=True)
    return [
        CheckpointStore(folder / "checkpoints", 2, (files or {}).get(rank), patience=patience or Patience())
        for rank in range(WORLD)
    ]


def _begin(stores: list[CheckpointStore], step: int, ranks: range, splits: bool = True) -> None:
    stores[0].begin_parts(step)
    for rank in ranks:
        model = _model(rank) if splits or rank == 0 else {}
        part = Part(rank, WORLD, splits)
        stores[rank].write(model, _training(rank), manifest(step), part)


def _saved(folder: Path, step: int = STEP, splits: bool = True) -> None:
    """A save to which all ranks have come."""
    stores = _stores(folder)
    _begin(stores, step, range(WORLD), splits)
    for store in stores:
        store.wait()


def _newest(folder: Path) -> int | None:
    found = newest_valid(folder / "checkpoints", print)
    return None if found is None else found.step


@pytest.mark.parametrize("splits", [True, False], ids=["weights", "optimizer"])
def test_all_parts_are_one_checkpoint(tmp_path: Path, splits: bool) -> None:
    _saved(tmp_path, splits=splits)
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
        assert load_file(found.folder / "model-00002-of-00003.safetensors").keys() == {"layer1.weight"}


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
    _saved(tmp_path)
    left = _stores(tmp_path, patience=Patience(lambda rank: rank == WORLD - 1))
    _begin(left, STEP + 1, range(WORLD - 1))
    with pytest.raises(PeerLost, match="part 3 of 3 was not written: rank 2 is gone"):
        left[0].wait()
    assert _newest(tmp_path) == STEP
    _saved(tmp_path, STEP + 1)
    assert _newest(tmp_path) == STEP + 1
    assert not list((tmp_path / "checkpoints").glob("*.partial"))


class _Fails(Files):
    """A disk that takes no files of weights."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def open_new(self, path: Path) -> Any:
        if path.name.startswith("model-"):
            raise self._error
        return super().open_new(path)


@pytest.mark.parametrize(
    ("error", "shown"), [(OSError(28, os.strerror(28)), CheckpointError), (MemoryError("no memory"), MemoryError)]
)
def test_a_part_that_cannot_be_written_is_an_error_of_both(
    tmp_path: Path, error: Exception, shown: type[Exception]
) -> None:
    words = "No space left" if isinstance(error, OSError) else "no memory"
    stores = _stores(tmp_path, {1: _Fails(error)})
    _begin(stores, STEP, range(WORLD))
    with pytest.raises(CheckpointError, match=f"part 2 of 3: {words}"):
        stores[0].wait()
    with pytest.raises(shown, match=words):
        stores[1].wait()
    stores[2].wait()
    assert newest_valid(tmp_path / "checkpoints", print) is None


class _Slow(Files):
    """A disk that takes a while for each file."""

    def open_new(self, path: Path) -> Any:
        time.sleep(0.5)
        return super().open_new(path)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_run_that_ends_by_an_error_waits_for_parts_that_are_still_written(tmp_path: Path, slow: int) -> None:
    stores = _stores(tmp_path, {slow: _Slow()}, Patience(seconds=1))
    _begin(stores, STEP, range(WORLD))
    stores[0].finish(ending=True)
    for store in stores:
        store.wait()
    assert _newest(tmp_path) == STEP


def test_a_run_that_ends_by_an_error_does_not_wait_for_ranks_that_write_nothing(tmp_path: Path) -> None:
    stores = _stores(tmp_path, patience=Patience(seconds=0.2))
    _begin(stores, STEP, range(WORLD - 1))
    stores[0].finish(ending=True)
    with pytest.raises(PeerLost, match=r"nothing came from rank 2 for 0\.2 s"):
        stores[0].wait()
    stores[1].wait()


def test_parts_of_two_checkpoints_are_not_merged(tmp_path: Path) -> None:
    _saved(tmp_path)
    folder = tmp_path / "checkpoints" / "step-00000004"
    shutil.copy(folder / "training-00002-of-00003.pt", folder / "training-00002-of-00004.pt")
    with pytest.raises(CheckpointError, match="parts of two checkpoints"):
        read_training(folder)


def test_a_best_checkpoint_without_weights_is_not_exported(tmp_path: Path) -> None:
    """It is damaged; the run resumes from another one."""
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    _stores(tmp_path)[0].export_best(manifest(STEP))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("killed", range(_OPERATIONS + 1))
def test_a_kill_at_any_file_operation_loses_no_checkpoint(tmp_path: Path, killed: int) -> None:
    """Of rank 1's: its operations end with the one of this number, as if the process were gone."""
    _saved(tmp_path)
    disk = _Dies(killed)
    dying = _stores(tmp_path, {1: disk}, Patience(lambda rank: rank == 1 and disk.is_dead))
    _begin(dying, STEP + 1, range(WORLD))
    for store in dying:
        store.finish()
    found = newest_valid(tmp_path / "checkpoints", print)
    assert found is not None
    assert found.step == (STEP if killed < _OPERATIONS else STEP + 1)
    read_training(found.folder)


class _Dies(Files):
    """File operations that end with one of them: what is written stays as it is."""

    def __init__(self, after: int) -> None:
        self._left = after
        self.is_dead = False

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.is_dead = True
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
    assert merged(whole, part) == {"a": [{"x": 1, "z": 5}, {"y": 2}], "b": 3, "c": {"d": 4, "e": 8}, "f": 9}
