"""Which differences each level of sameness allows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samestep.train.record import RunRecord
from samestep.verify.compare import Verification, compare_runs


def recorded(
    folder: Path,
    *,
    weight: float = 1.0,
    losses: tuple[float, ...] = (2.0, 1.0),
    samples: tuple[str, ...] = ("a", "b"),
    ranks: tuple[str, ...] = ("x", "x"),
    threads: tuple[int, ...] = (1, 1),
) -> Path:
    """The record of a run of two steps."""
    folder.mkdir(parents=True)
    record = RunRecord(len(ranks), len(losses), [*losses], [*samples], "hash", [*ranks], 0.1, threads=[*threads])
    (folder / "record.json").write_text(json.dumps(asdict(record)))
    save_file({"model.w": torch.tensor([weight, 3.0])}, folder / "state.safetensors")
    return folder


def verified(folder: Path, same: str, curve: tuple[float, ...] = (), **changes: object) -> Verification:
    """The first run against one with these changes."""
    records = {"1": recorded(folder / "1"), "2": recorded(folder / "2", **changes)}  # type: ignore[arg-type]
    return compare_runs(same, records, curve, rtol=1e-3)


@pytest.mark.parametrize("same", ["bits", "rounding", "samples"])
def test_equal_runs_keep_every_promise(tmp_path: Path, same: str) -> None:
    result = verified(tmp_path, same)
    assert result.kept
    assert [world.difference for world in result.worlds] == [None, None]


@pytest.mark.parametrize(
    ("changes", "allowed_by"),
    [
        ({"losses": (2.0, 1.0 + 1e-6)}, ("rounding", "samples")),
        ({"weight": 1.0 + 1e-6}, ("rounding", "samples")),
        ({"losses": (2.0, 1.1)}, ("samples",)),
        ({"weight": 1.1}, ("samples",)),
        ({"ranks": ("x", "y")}, ("samples",)),
        ({"samples": ("a", "c")}, ()),
        ({"losses": (2.0,), "samples": ("a",)}, ()),
    ],
    ids=str,
)
def test_a_difference_is_allowed_by_some_levels(
    tmp_path: Path, changes: dict[str, object], allowed_by: tuple[str, ...]
) -> None:
    for same in ("bits", "rounding", "samples"):
        result = verified(tmp_path / same, same, **changes)
        assert result.kept == (same in allowed_by), same
        assert result.worlds[1].difference is not None, "it is reported nevertheless"


def test_the_first_difference_is_named_with_the_tensor_that_differs_most(tmp_path: Path) -> None:
    difference = verified(tmp_path, "bits", losses=(2.0, 1.5), weight=1.5).worlds[1].difference
    assert difference is not None
    assert (difference.what, difference.step, difference.tensor) == ("loss", 1, "model.w")


@pytest.mark.parametrize("losses", [(2.0, 1.0), (2.0, 1.1)])
def test_other_numbers_of_threads_are_noted_and_are_no_difference_by_themselves(
    tmp_path: Path, losses: tuple[float, ...]
) -> None:
    result = verified(tmp_path, "bits", threads=(2, 2), losses=losses)
    assert result.kept is (losses == (2.0, 1.0))
    assert "2 threads per rank, not 1 as in the first run" in str(result.worlds[1])
    document = result.as_json()["worlds"]
    assert document["2"]["threads_per_rank"] == [2, 2]
    assert document["1"]["note"] is None


@pytest.mark.parametrize(
    ("curve", "kept"), [((2.0, 1.0005), True), ((2.0, 1.0, 7.0), True), ((2.0,), True), ((2.1, 1.0), False)]
)
def test_a_given_curve_is_compared_as_far_as_both_go(tmp_path: Path, curve: tuple[float, ...], kept: bool) -> None:
    result = verified(tmp_path, "bits", curve)
    assert result.kept is kept
    document = result.as_json()
    assert document["against"]["steps"] == len(curve)
    assert (document["against"]["first_difference"] is None) is kept
