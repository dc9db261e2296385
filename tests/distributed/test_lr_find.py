"""The range test on ranks: one curve at any world size, and nothing else is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.bench.tuning.lr_range_test import RangeTestResult, find_lr
from samestep.bench.tuning.lr_suggestion import RangeTest
from samestep.config import load_config
from tests.distributed.running import rows_of, settings, train
from tests.ranks import run_ranks


def _find(config: dict[str, Any], test: RangeTest) -> RangeTestResult:
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware

    loaded = load_config(config)
    with create_run_context(loaded, detect_hardware()) as context:
        return find_lr(loaded, context, test)


def find(folder: Path, world: int, test: RangeTest, task: str, **values: Any) -> RangeTestResult:
    """The result of all ranks, which must be one."""
    config = settings(task, folder / f"run-{world}", **values)
    first, *others = run_ranks(_find, world, config, test)
    assert all(other.as_json() == first.as_json() for other in others)
    return first


def rows(found: RangeTestResult) -> list[dict[str, Any]]:
    return [row for row in rows_of(found.folder) if "loss" in row]


@pytest.mark.requirement("000-P1-9")
def test_the_curve_and_the_suggestions_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    test = RangeTest(1e-5, 10.0, 60)
    one, two, four = (find(tmp_path, world, test, "TwoOptimizers") for world in (1, 2, 4))
    assert one.as_json() == two.as_json() == four.as_json()
    assert set(one.suggestions) == {"steepest", "valley"}
    assert all(1e-5 < rate < 10 for rate in one.suggestions.values())
    assert len(one.curve.losses) > 20, "epochs of three steps are gone through again"
    for row, rate in zip(rows(one), one.curve.rates, strict=True):
        assert row["lr"] == pytest.approx([rate, 2.5 * rate]), "groups keep their ratio"
    assert one.rate_now == 0.02, "the first group's, where the config names none"


@pytest.mark.variation("test_a_loss_that_is_infinite_at_once_is_no_suggestion, after some steps and on ranks")
def test_weights_that_explode_are_the_end_of_the_curve_and_not_a_failure(tmp_path: Path) -> None:
    test = RangeTest(1e-6, 1e30, 60, stop_factor=1e300)
    values = {"params": {"optimizer": "momentum"}, "on_nonfinite": "skip"}
    found = [find(tmp_path, world, test, "Everything", **values) for world in (1, 2, 4)]
    assert found[0].as_json() == found[1].as_json() == found[2].as_json()
    assert found[0].curve.stopped == "the loss or the weights are NaN or infinite"
    assert 10 <= len(found[0].curve.losses) < 60


def test_a_loss_that_is_infinite_at_once_is_no_suggestion(tmp_path: Path) -> None:
    found = find(tmp_path, 2, RangeTest(), "BadLoss", params={"step": 3})
    assert len(found.curve.losses) == 3
    assert found.suggestions == {}
    assert found.wrong is not None
    assert "after 3 steps already" in found.wrong


def test_a_run_in_the_directory_stays_whole(tmp_path: Path) -> None:
    trained = train(tmp_path, 1, log_every=1)
    before = {p: p.read_bytes() for p in trained.folder.rglob("*") if p.is_file()}
    assert any("checkpoints" in str(path) for path in before)
    config = settings("Everything", trained.folder)
    for _ in range(2):
        (found,) = run_ranks(_find, 1, config, RangeTest(steps=20))
    after = {p: p.read_bytes() for p in trained.folder.rglob("*") if p.is_file()}
    assert {path: after[path] for path in before} == before
    added = {path.relative_to(trained.folder).parts[0] for path in after.keys() - before.keys()}
    assert added == {"tune-lr"}
    assert not (found.folder / "checkpoints").exists()
    assert (found.folder / "earlier" / "1" / "metrics.jsonl").exists()
    assert found.curve.losses[0] == trained.record.losses[0], "the weights that a run starts with"
