"""Hangs, missing collectives, bad losses and ranks that drift apart: found, named, agreed on."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.manifest import verify_checkpoint
from samestep.errors import NonFiniteLoss
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import assert_same, settings, train, train_rank
from tests.ranks import answers_of_ranks, run_ranks

QUICK = {"distributed": {"timeout": 6, "threads_per_rank": 1}}


def everything_said(folder: Path, task: str, world: int, **values: Any) -> str:
    """What the ranks of a failing run said, in what they raised and in their logs."""
    config = settings(task, folder, **values)
    answers = answers_of_ranks(train_rank, world, config)
    assert not any(ok for ok, _ in answers)
    logs = [path.read_text() for path in sorted((folder / "logs").glob("rank-*.log"))]
    return "\n".join([*(str(text) for _, text in answers), *logs])


@pytest.mark.variation("test_a_hang_names_the_rank_that_hangs, without a launcher")
@pytest.mark.requirement("000-P4-8")
def test_a_rank_that_sleeps_in_its_loader_is_named_with_its_stack(tmp_path: Path) -> None:
    said = everything_said(tmp_path / "run", "SleepyData", 3, **QUICK)
    assert "a collective waited longer than distributed.timeout (6 s)" in said
    assert "rank 1 on " in said
    assert " is in data loading at step 1 for " in said
    assert "ranks 0, 2 wait in " in said
    assert "rank 1's Python stack" in said
    assert "time.sleep(10_000)" in said, "the line it sleeps in"


@pytest.mark.variation("test_only_a_run_in_which_nothing_moves_is_ended: it holds the interpreter too, in one process")
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a silent process does")
def test_a_rank_that_holds_the_interpreter_is_described_as_that(tmp_path: Path) -> None:
    said = everything_said(tmp_path / "run", "HoldsInterpreter", 2, **QUICK)
    assert re.search(
        r"rank 1 on \S+ \(pid \d+\) runs but is silent: it holds the interpreter \(its log then has its "
        r"stacks\), or is ending; its last sign of life, \d+ s ago, was from ",
        said,
    )
    stacks = (tmp_path / "run" / "logs" / "rank-1.log").read_text()
    assert "in loss" in stacks, "where it is, and not where it was when it last reported"


@pytest.mark.requirement("004-CI-3")
def test_a_rank_that_skips_a_collective_is_named(tmp_path: Path) -> None:
    said = everything_said(tmp_path / "run", "SkipsBarrier", 4, **QUICK)
    assert "the ranks called different collectives as #" in said
    assert "ranks 0, 2-3 called barrier; rank 1 called buffers" in said


def test_a_rank_that_raises_is_told_to_all(tmp_path: Path) -> None:
    said = everything_said(tmp_path / "run", "Broken", 3, params={"rank": 2})
    assert said.count("failed first: ZeroDivisionError: my own bug") >= 2


@pytest.mark.parametrize("world", [1, 3])
def test_a_loss_that_is_not_a_number_stops_all_ranks(world: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    values = {"params": {"step": 4}, "log_every": 4, "checkpoint": {"every_steps": 1}}
    said = everything_said(folder, "BadLoss", world, **values)
    assert said.count("the loss of step 4 is NaN or infinite in lane 5 (samples ") >= world
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    assert verify_checkpoint(newest).step == 4, "the step before it is the last one saved"


def test_skipping_bad_steps_is_the_same_run_at_any_size(tmp_path: Path) -> None:
    values = {"task": "BadLoss", "params": {"step": 4}, "on_nonfinite": "skip"}
    runs = [train(tmp_path, world, **values) for world in (1, 2, 4)]
    assert_same(runs)
    log = (runs[1].folder / "logs" / "rank-0.log").read_text()
    assert "in lane 5 (samples " in log
    assert "the step is skipped" in log
    assert '"skipped": true' in (runs[1].folder / "metrics.jsonl").read_text()
    assert all(bool(value.isfinite().all()) for value in runs[0].state.values())


@pytest.mark.requirement("002-X-3")
def test_ranks_that_drift_apart_are_found_by_tensor(tmp_path: Path) -> None:
    said = everything_said(tmp_path / "run", "Drifting", 3, check_ranks_every=2)
    assert "the ranks are not the same after step 3" in said
    assert "model.last.bias on rank 1 is not what it is on ranks 0, 2" in said
    same = train(tmp_path, 3, check_ranks_every=1)
    assert same.record.steps == 6


def test_one_ranks_signal_a_step_earlier_stops_all_at_one_boundary(tmp_path: Path) -> None:
    """Each rank gets its signal in a step of its own; rank 2 first."""
    folder = tmp_path / "run"
    said = answers_of_ranks(_signalled_one_after_another, 3, settings("Everything", folder))
    assert [text.strip().splitlines()[-1] for _, text in said] == [
        "samestep.errors.Stopped: SIGUSR2 on rank 2 stopped the run after step 3: it is saved, "
        "and resumes from there when it is started again"
    ] * 3
    assert finish(folder, 2).record.state_hash == train(tmp_path, 1).record.state_hash


def _signalled_one_after_another(config: dict[str, Any]) -> None:
    import os
    import signal

    from samestep.step.lane_passes import LanePasses

    rank, whole = int(os.environ["RANK"]), LanePasses.update

    def update(self: LanePasses, *args: Any) -> None:
        # After the flags of this step have left: it rides on the next one.
        whole(self, *args)
        if self.data.index == 3 - rank:
            os.kill(os.getpid(), signal.SIGUSR2)

    LanePasses.update = update  # type: ignore[method-assign]
    train_rank(config)


def test_minutes_are_counted_on_rank_0_and_saved_together(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rules = {"every_minutes": 1e-6, "every_epochs": None, "keep_last": 50}
    go_on(folder, 2, at=4, how="raises", checkpoint=rules, log_every=1)
    assert len(list((folder / "checkpoints").iterdir())) == 4


def _with_little_disk(config: dict[str, Any]) -> None:
    """From the third checkpoint on no file may grow beyond 8 kB."""
    import resource

    from samestep.checkpoint.files import Files

    whole, opened = Files.open_new, [0]

    def open_new(self: Files, path: Path) -> Any:
        opened[0] += 1
        if opened[0] > 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        return whole(self, path)

    Files.open_new = open_new  # type: ignore[method-assign]
    train_rank(config)


def test_a_disk_that_is_full_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = settings("Everything", folder, checkpoint={"every_steps": 1})
    said = answers_of_ranks(_with_little_disk, 2, config)
    assert "CheckpointError: checkpoint " in said[0][1]
    assert "step-00000003 could not be written: File too large" in said[0][1]
    assert "The checkpoints before it are intact" in said[0][1]
    assert finish(folder, 1).record.state_hash == train(tmp_path, 1).record.state_hash


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = everything_said(folder, "BadGradient", 2, checkpoint={"every_steps": 1})
    assert said.count("weights are NaN or infinite after step 3, though its loss was not") >= 2
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    assert verify_checkpoint(newest).step == 3


def _fails_then_trains(folder: str) -> None:
    """In one process group that stays open, as in a sweep of trials; all ranks fail the first."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    bad = settings("BadLoss", Path(folder) / "first", params={"step": 1})
    with pytest.raises(NonFiniteLoss):
        train_rank(bad)
    train_rank(settings("Slow", Path(folder) / "second", epochs=2, params={"seconds": 0.2}))
    dist.destroy_process_group()


def test_a_run_does_not_hear_of_the_failure_of_the_one_before(tmp_path: Path) -> None:
    """Its heartbeat would end it after some seconds, of which this run takes enough."""
    run_ranks(_fails_then_trains, 2, str(tmp_path))
    assert len(list((tmp_path / "second" / "checkpoints").iterdir())) == 2
