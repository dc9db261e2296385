"""The checkpoints of a run: which are intact, and which one is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from samestep.checkpoint.listing import list_checkpoints, newest_valid, select_checkpoint
from samestep.checkpoint.manifest import MODEL, folder_name
from samestep.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import DAMAGED, manifest, put, run_with

MANY = 100_000_000


@DAMAGED
def test_the_newest_valid_one_is_used_and_others_are_named(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    for step in (2, 4, 6):
        put(tmp_path, saved=manifest(step))
    damage(tmp_path / folder_name(6))
    warnings: list[str] = []
    found = newest_valid(tmp_path, warnings.append)
    assert found is not None
    assert (found.step, found.wrong) == (4, "")
    assert found.manifest is not None
    assert found.manifest.step == 4
    [line] = warnings
    assert line.startswith(f"checkpoint {tmp_path / folder_name(6)} is not used: ")

    listed = list_checkpoints(tmp_path, checksums=True)
    assert [(item.step, bool(item.wrong)) for item in listed] == [(2, False), (4, False), (6, True)]
    assert listed[-1].manifest is None


def test_checkpoints_none_of_which_is_valid_are_an_error_that_names_all(tmp_path: Path) -> None:
    for step in (2, 4):
        (put(tmp_path, saved=manifest(step)) / MODEL).unlink()
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match=r"none of the 2 .* resume=never"):
        newest_valid(tmp_path, warnings.append)
    assert [folder_name(4) in warnings[0], folder_name(2) in warnings[1], len(warnings)] == [True, True, 2]
    assert newest_valid(tmp_path / "not there", warnings.append) is None


def test_only_directories_of_ours_are_listed(tmp_path: Path) -> None:
    put(tmp_path, saved=manifest(4))
    put(tmp_path, saved=manifest(6)).rename(tmp_path / "step-00000006.partial")
    for name in ("step-best", "step-", "epoch-00000001", "step-0000002x"):
        (tmp_path / name).mkdir()
    (tmp_path / folder_name(8)).write_text("a file")
    assert [item.folder.name for item in list_checkpoints(tmp_path, checksums=True)] == [folder_name(4)]


def test_a_hundred_million_steps_come_after_fewer(tmp_path: Path) -> None:
    for step in (MANY - 1, MANY):
        put(tmp_path, saved=manifest(step))
    found = newest_valid(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == MANY


@pytest.mark.parametrize(("which", "step"), [("best", 2), ("last", 4), ("2", 2), ("4", 4)])
def test_a_checkpoint_is_selected_by_name_or_step(tmp_path: Path, which: str, step: int) -> None:
    assert select_checkpoint(run_with(tmp_path, model=nn.Linear(1, 1)), which).step == step


def test_without_a_best_one_the_last_is_the_best(tmp_path: Path) -> None:
    put(tmp_path / "checkpoints", saved=manifest(4))
    put(tmp_path / "checkpoints", saved=manifest(6))
    assert select_checkpoint(tmp_path, "best").step == 6


def test_the_error_for_an_unknown_checkpoint_lists_the_known_ones(tmp_path: Path) -> None:
    run = run_with(tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"'3': .* has best, last and the steps 2, 4$"):
        select_checkpoint(run, "3")
    with pytest.raises(CheckpointError, match="holds no valid checkpoint"):
        select_checkpoint(tmp_path / "elsewhere", "last")
