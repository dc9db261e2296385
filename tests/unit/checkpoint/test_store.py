"""Which checkpoints stay, and whose weights are exported beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from samestep.checkpoint.listing import list_checkpoints
from samestep.checkpoint.manifest import MODEL, Best, folder_name
from samestep.checkpoint.store import CheckpointStore
from samestep.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import manifest


def store_at(folder: Path, keep_last: int) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", keep_last)


def write(store: CheckpointStore, step: int, best: int | None = None) -> None:
    saved = manifest(step, best=best and Best(best, "val_loss", 0.5))
    store.write_now({"weight": torch.full((2,), float(step))}, {"optimizers": []}, saved)


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
        (1, [(2, None), (4, 3)], [4]),  # the best one does not exist any more
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
def test_the_best_ones_stay_by_the_values_of_their_own_weights(
    tmp_path: Path, rule: dict[str, str], keep_best: int, best: int | None, left: list[int]
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", 1, keep_best=keep_best)
    values = {2: 0.3, 4: 0.5, 6: 0.1, 8: 0.9, 10: float("nan"), 12: 0.99}
    for step, value in values.items():
        saved = manifest(
            step,
            metrics={"f1": value},
            measured=step if step < 12 else 8,  # the last one was not measured itself
            config={"best": rule} if rule else {},
            best=None if best is None or step < best else Best(best, "f1", 0.0),
        )
        store.write_now({"weight": torch.zeros(2)}, {"optimizers": []}, saved)
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
def test_the_best_or_last_weights_are_exported_beside_the_checkpoints(
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


def test_a_run_directory_that_was_removed_does_not_come_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = store_at(run, 2)
    store.write({"weight": torch.ones(2)}, {}, manifest(2))
    with pytest.raises(CheckpointError, match="is gone: it was removed or renamed"):
        store.wait()
    assert not run.exists()
