"""A rank is lost: one that is left saves the last step boundary, and the run repeats one step."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.manifest import verify_checkpoint
from samestep.distributed.health.heartbeat import Heartbeat
from tests.cli.processes import wait_for
from tests.distributed.interrupting import finish, go_on, train_and_end
from tests.distributed.running import EACH_EPOCH, rows_of, settings, train
from tests.ranks import RankProcesses
from tests.variations import variations

RARELY = {"every_epochs": None, "every_minutes": None, "every_steps": 1000}
"""Of a run that would have to start again from its last evaluation, or its first step."""
WHOLE: dict[str, Any] = {
    "epochs": 3,
    "checkpoint": RARELY,
    "log_every": 4,
    "clip": {"norm": 0.5},
    "ema": {"decay": 0.9},
    "evaluation": EACH_EPOCH,
}
WITHOUT_EVALUATION: dict[str, Any] = {"checkpoint": RARELY, "evaluation": {"every_epochs": None}}


def saved_steps(folder: Path) -> list[int]:
    found = (folder / "checkpoints").glob("step-????????")
    return sorted(verify_checkpoint(path).step for path in found)


def said(folder: Path) -> str:
    return "\n".join(path.read_text() for path in (folder / "logs").glob("rank-*.log"))


def measured(folder: Path) -> list[dict[str, Any]]:
    """The rows of the metrics file, but for times."""
    values = [{k: v for k, v in row.items() if k != "seconds"} for row in rows_of(folder)]
    return [row for row in values if "samples_per_second" not in row]


@pytest.mark.parametrize("rank", variations([3, 0], kept=[0]))
def test_a_lost_rank_costs_one_step_and_no_bit(rank: int, tmp_path: Path) -> None:
    """BatchNorm, dropout, clipping, two lanes a rank, EMA and an uneven tail; on 4 ranks, then 3."""
    untouched = train(tmp_path, 1, **WHOLE)
    folder = tmp_path / "run"
    # In the tail of the second epoch: the first has ended with an evaluation, the best so far.
    go_on(folder, 4, at=5, rank=rank, how="kill -9", **WHOLE)
    assert saved_steps(folder) == [3, 5], said(folder)
    assert "Lost a rank. The run is saved after step 5; started again, it resumes there" in said(folder)
    assert not list((folder / "checkpoints").glob("*.survivor*"))
    ended = finish(folder, 3, **WHOLE).record
    assert ended.start == 5, "the step that was lost is repeated, and no other"
    assert ended.state_hash == untouched.record.state_hash
    assert ended.losses == untouched.record.losses
    assert measured(folder) == measured(untouched.folder), "rank 0's rows, too, if it was lost"


def never_look_on_rank_2(*args: Any) -> int:
    """Train; rank 2 does not find out by itself that another rank is silent."""
    if os.environ["RANK"] == "2":
        Heartbeat._watch_for_silence = lambda self, waited: None  # type: ignore[method-assign]
    return train_and_end(*args)


@pytest.mark.parametrize("target", variations([train_and_end, never_look_on_rank_2], kept=[never_look_on_rank_2]))
def test_a_rank_that_falls_silent_leaves_the_others_time_to_save(target: Callable[..., int], tmp_path: Path) -> None:
    """No connection to it breaks: their main threads wait in the exchange when they are ended.

    A rank that looks later than rank 0 finds no store any more, and ends nevertheless.
    """
    values = {**WITHOUT_EVALUATION, "distributed": {"lost_after": 5}}
    folder = tmp_path / "run"
    config = settings("Everything", folder, **values)
    args = (config, str(folder / "record"), 2, 1, "SIGSTOP")
    ranks = RankProcesses(target, 3, args)
    silent = ranks.processes[1]
    try:
        wait_for(lambda: not any(ranks.processes[rank].is_alive() for rank in (0, 2)), 60)
    finally:
        with suppress(ProcessLookupError):  # the kernel wakes it if nobody is left to do so
            os.kill(silent.pid or 0, signal.SIGKILL)
        ranks.answers()
    assert saved_steps(folder) == [2], said(folder)
    ended = finish(folder, 2, **WITHOUT_EVALUATION).record
    assert ended.state_hash == train(tmp_path, 1, **WITHOUT_EVALUATION).record.state_hash


FALLS_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "streams": (
        {**WITHOUT_EVALUATION, "task": "StatefulStreamed"},
        "a rank knows the positions of its own streams only",
    ),
    "an average that only rank 0 holds": (
        {**WITHOUT_EVALUATION, "ema": {"decay": 0.9, "policy": "rank0"}},
        "only rank 0 holds the average (ema.policy: rank0)",
    ),
    "buffers of each rank": (
        {**WITHOUT_EVALUATION, "same": "samples"},
        "with same: samples every rank has buffers of its own",
    ),
    "an evaluation": (
        {"task": "LostInEvaluation", "checkpoint": RARELY},
        "the last step had been updated and was not over, as in an evaluation",
    ),
}


@pytest.mark.parametrize("case", variations(FALLS_BACK, kept=["streams", "an evaluation"]))
def test_what_one_rank_does_not_hold_is_not_saved_and_the_log_has_the_reason(case: str, tmp_path: Path) -> None:
    values, reason = FALLS_BACK[case]
    go_on(tmp_path / "run", 2, at=2, how="" if case == "an evaluation" else "kill -9", **values)
    assert f"Lost a rank. Started again, the run resumes from its last checkpoint: {reason}" in said(tmp_path / "run")
    assert saved_steps(tmp_path / "run") == []


def test_without_checkpoints_nothing_is_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go_on(folder, 2, at=2, rank=1, how="kill -9", checkpoint={"enabled": False})
    assert not (folder / "checkpoints").exists()
    assert "Lost a rank" not in said(folder)
