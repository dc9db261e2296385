"""A tracker's trouble stays its own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep.tracking.contract import TrackedRun, Tracker
from samestep.tracking.guard import GuardedTracker
from tests.unit.tracking.running import a_figure, tracked


class Noting(Tracker):
    """Notes its calls; raises in the one that it is asked to."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails

    def _note(self, call: str) -> None:
        random.random()
        np.random.rand()
        torch.rand(1)
        self.calls.append(call)
        if call.startswith(self._fails or "?"):
            raise OSError("no network\nand more")

    def start(self, run: TrackedRun) -> None:
        self._note(f"start at {run.start}")

    def write(self, row: dict[str, Any]) -> None:
        self._note(f"write {row['step']}")

    def log_file(self, path: Path, name: str) -> None:
        self._note(f"file {name}")

    def flush(self) -> None:
        self._note("flush")

    def close(self) -> None:
        self._note("close")


def drive(tracker: GuardedTracker, folder: Path) -> None:
    for step in (0, 1):
        tracker.write({"step": step})
        tracker.flush()
    tracker.log_file(folder / "a", "a")
    tracker.close()


def test_it_is_started_by_its_first_row(tmp_path: Path) -> None:
    noting = Noting()
    drive(GuardedTracker("trackers.x", noting, tracked(tmp_path, start=7)), tmp_path)
    assert noting.calls == ["start at 7", "write 0", "flush", "write 1", "flush", "file a", "close"]


def test_a_run_without_a_row_leaves_no_trace(tmp_path: Path) -> None:
    noting = Noting()
    tracker = GuardedTracker("trackers.x", noting, tracked(tmp_path))
    tracker.flush()
    tracker.close()
    assert noting.calls == []


@pytest.mark.parametrize("call", ["start", "write 1", "flush", "file", "close"])
def test_an_error_is_one_warning_and_the_last_call(tmp_path: Path, call: str) -> None:
    noting, warnings = Noting(call), list[str]()
    tracker = GuardedTracker("trackers.x", noting, tracked(tmp_path))
    tracker.warn = warnings.append
    drive(tracker, tmp_path)
    assert len(warnings) == 1
    assert warnings[0].startswith("trackers.x failed and gets nothing more of this run: OSError: no network.")
    assert noting.calls[-1].startswith(call)


def test_a_warning_waits_until_someone_takes_it(tmp_path: Path) -> None:
    tracker, warnings = (GuardedTracker("trackers.x", Noting("start"), tracked(tmp_path)), list[str]())
    tracker.write({"step": 0})
    tracker.flush()
    tracker.warn = warnings.append
    tracker.write({"step": 1})
    tracker.flush()
    assert len(warnings) == 1


def test_ctrl_c_in_a_tracker_still_ends_the_run(tmp_path: Path) -> None:
    class Interrupted(Noting):
        def start(self, run: TrackedRun) -> None:
            raise KeyboardInterrupt

    tracker = GuardedTracker("trackers.x", Interrupted(), tracked(tmp_path))
    tracker.write({"step": 0})
    with pytest.raises(KeyboardInterrupt):
        tracker.flush()


@pytest.mark.parametrize("fails", ["", "write"])
def test_what_it_draws_changes_no_number_of_the_run(tmp_path: Path, fails: str) -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(1))]

    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # type: ignore[func-returns-value]
    expected = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # type: ignore[func-returns-value]
    noting = Noting(fails)
    drive(GuardedTracker("trackers.x", noting, tracked(tmp_path)), tmp_path)
    assert noting.calls
    assert drawn() == expected


def test_a_figure_is_handed_on_at_once(tmp_path: Path) -> None:
    noting = Noting()
    GuardedTracker("trackers.x", noting, tracked(tmp_path)).write({"step": 3, "curve": a_figure()})
    assert noting.calls == ["start at 0", "write 3"]
