"""What happens at the end of a step, decided from the flags of all ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from samestep.config import load_config
from samestep.data.batch import Position, Source, StepData
from samestep.distributed.context import RunContext, SingleProcessContext
from samestep.errors import NonFiniteLoss, RanksDiffer, Stopped
from samestep.reduce.stats import NO_FLAGS, LaneStats, LocalStats, RankFlags, ReadFlags
from samestep.run import step_end as step_end_module
from samestep.run.step_end import StepEnd
from samestep.run_setup import RunSetup
from samestep.tracking.listeners import RunListener
from tests.unit.contexts import TwoRanks

SAVE = 256.0
PLAN = {"lanes": 2}


class FlagStats(LocalStats):
    """Stats with the flags of several ranks, which on a GPU would have to be waited for."""

    def __init__(self, flags: Sequence[RankFlags], waits: bool) -> None:
        super().__init__([LaneStats(1.0, 1.0)], flags[0])
        self._by_rank, self._waits = list(flags), waits

    def flags(self) -> ReadFlags:
        return lambda: self._by_rank

    @property
    def no_requests(self) -> bool:
        return False

    @property
    def flags_wait(self) -> bool:
        return self._waits


class Passes:
    """A finished step, as far as its end looks at it."""

    def __init__(self, data: StepData, stats: LocalStats, bad: bool = False) -> None:
        self.data, self.stats, self._bad = data, stats, bad

    def refuse_bad_weights(self) -> None:
        if self._bad:
            raise NonFiniteLoss("weights are NaN")


class Saver:
    """Notes what is saved."""

    ended: str | None = None
    due_after: tuple[int, ...] = ()
    time_is_up = False
    saves = True

    def __init__(self, events: list[Any]) -> None:
        self._events = events
        self.metrics = {"val_loss": 0.5}
        self.positions: list[Position] = []

    def is_due(self, steps: int, epochs: int, ends_epoch: bool) -> bool:
        return steps in self.due_after

    def wants_time(self) -> bool:
        return self.time_is_up

    def save(self, after: Position, plan: Any, ended: str | None) -> bool:
        assert plan == PLAN
        self.positions.append(after)
        self._events.append(("save", after.step, ended))
        return self.saves

    def wait(self) -> None:
        self._events.append("wait")


class Times:
    def __init__(self) -> None:
        self.busy: list[list[float]] = []

    def add_busy(self, flags: Sequence[RankFlags]) -> None:
        self.busy.append([rank.busy for rank in flags])

    def since_last_flags(self) -> float:
        return 1.5


class Log:
    bad = False

    def __init__(self, events: list[Any]) -> None:
        self._events = events
        self.times = Times()

    def flush(self) -> None:
        self._events.append("flush")
        if self.bad:
            raise NonFiniteLoss("the loss is NaN")

    def complete(self) -> None:
        self._events.append("complete")


class Listener(RunListener):
    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def on_save(self, step: int, metrics: Any) -> None:
        self._events.append(("on_save", step, dict(metrics)))


class NoStreams(Source):
    samples = steps_per_epoch = None

    def steps(self, start: Position, stop: int | None) -> Any:
        raise AssertionError("the end of a step reads nothing")


class WithStreams(NoStreams):
    has_streams = True


def step_data(index: int, **changes: Any) -> StepData:
    values: dict[str, Any] = {
        "index": index, "epoch": 0, "epoch_step": index, "ends_epoch": False, "units": (0, 1),
        "ragged": False, "read": lambda: None,
    }  # fmt: skip
    return StepData(**{**values, **changes})


class Boundaries:
    """What survivors would save."""

    def __init__(self) -> None:
        self.reached_all: list[Any] = []

    def reached(self, *boundary: Any) -> None:
        self.reached_all.append(boundary)


class End:
    """A step's end on fakes that note what it does."""

    def __init__(self, context: RunContext, **values: Any) -> None:
        self.events: list[Any] = []
        config = load_config({"global_batch": 4, "lanes": 2, "epochs": 3, **values})
        self.saver, self.log = Saver(self.events), Log(self.events)
        setup = RunSetup.create(config, context)
        self.boundaries = Boundaries()
        fakes: Any = (self.saver, self.log, Listener(self.events), self.boundaries)
        self.end = StepEnd(setup, *fakes)

    def step(
        self,
        index: int,
        *flags: float,
        waits: bool = False,
        total: int | None = 100,
        source: Source | None = None,
        bad: bool = False,
        **data: Any,
    ) -> bool:
        ranks = [RankFlags(flag, busy=float(rank)) for rank, flag in enumerate(flags)]
        stats = FlagStats(ranks, waits) if flags else LocalStats([LaneStats(1.0, 1.0)], NO_FLAGS)
        passes: Any = Passes(step_data(index, **data), stats, bad)
        return self.end.end(passes, source or NoStreams(), PLAN, total)


# -- saving ---------------------------------------------------------------------------------------


def test_a_step_with_nothing_due_does_nothing(context: SingleProcessContext) -> None:
    end = End(context)
    assert not end.step(0)
    assert not end.step(1, 0.0)
    assert end.events == []


def test_a_save_that_is_due_comes_after_the_losses_and_is_reported(context: SingleProcessContext) -> None:
    end = End(context)
    end.saver.due_after = (2,)
    assert not end.step(0)
    assert not end.step(1)
    assert end.events == ["flush", ("save", 2, None), ("on_save", 2, {"val_loss": 0.5})]


def test_any_ranks_request_saves_the_run(two_ranks: TwoRanks) -> None:
    end = End(two_ranks)
    assert not end.step(4, 0.0, SAVE)
    assert ("save", 5, None) in end.events
    assert "wait" not in end.events, "the write continues behind the next step"


def test_a_save_that_wrote_nothing_is_not_reported(context: SingleProcessContext) -> None:
    end = End(context)
    end.saver.saves = False
    end.step(0, SAVE)
    assert end.events == ["flush", ("save", 1, None)]


@pytest.mark.parametrize("what", ["loss", "weights"])
def test_a_step_that_is_not_finite_is_not_saved(context: SingleProcessContext, what: str) -> None:
    end = End(context)
    end.log.bad = what == "loss"
    with pytest.raises(NonFiniteLoss):
        end.step(0, SAVE, bad=what == "weights")
    assert end.events == ["flush"]


def test_states_of_streams_are_gathered_from_all_ranks(two_ranks: TwoRanks) -> None:
    end = End(two_ranks)
    two_ranks.other = {1: "of the other"}
    end.step(0, SAVE, 0.0, source=WithStreams(), streams={0: "mine"})
    assert dict(end.saver.positions[0].streams) == {0: "mine", 1: "of the other"}


# -- the last step --------------------------------------------------------------------------------


def test_the_end_of_a_runs_length_is_done_whatever_else_was_requested(context: SingleProcessContext) -> None:
    end = End(context)
    end.end.stop_reason = "patience"
    assert end.step(4, total=5)
    assert ("save", 5, "done") in end.events


def test_a_signal_with_the_last_step_does_not_make_the_run_unfinished(context: SingleProcessContext) -> None:
    assert End(context).step(4, float(signal.SIGTERM), total=5)


# -- stopping -------------------------------------------------------------------------------------


def test_a_signal_saves_waits_for_the_disk_and_stops(context: SingleProcessContext) -> None:
    end = End(context)
    with pytest.raises(Stopped, match=r"^SIGTERM stopped the run after step 8: it is saved") as stop:
        end.step(7, float(signal.SIGTERM))
    assert stop.value.exit_code == 75
    assert [event if isinstance(event, str) else event[0] for event in end.events] == [
        "flush", "save", "on_save", "wait",
    ]  # fmt: skip


def test_a_stop_without_checkpoints_reports_that_nothing_is_saved(context: SingleProcessContext) -> None:
    end = End(context, checkpoint={"enabled": False})
    with pytest.raises(Stopped, match=r"nothing is saved, since checkpoint\.enabled is false"):
        end.step(0, float(signal.SIGTERM))


def test_only_a_signal_requeues_the_job(context: SingleProcessContext, monkeypatch: pytest.MonkeyPatch) -> None:
    requeued: list[str] = []
    monkeypatch.setattr(step_end_module, "requeue", lambda rules, name, environ, report: requeued.append(name))
    end = End(context)
    end.end.pause_after = 1
    with pytest.raises(Stopped):
        end.step(0)
    assert requeued == []
    with pytest.raises(Stopped):
        End(context).step(0, float(signal.SIGUSR1))
    assert requeued == ["SIGUSR1"]


# -- flags that are read late ---------------------------------------------------------------------


def test_flags_on_a_gpu_are_read_two_steps_late(context: SingleProcessContext) -> None:
    end = End(context)
    for index, flag in enumerate([SAVE, 0.0, 0.0, 0.0]):
        end.step(index, flag, waits=True)
    assert [event[1] for event in end.events if event[0] == "save"] == [3]


def test_flags_in_flight_are_read_though_later_steps_request_nothing(context: SingleProcessContext) -> None:
    end = End(context)
    end.step(0, SAVE, waits=True)
    assert end.events == []
    end.step(1)  # nothing requested, and nothing to wait for
    assert ("save", 2, None) in end.events


def test_the_work_of_each_rank_is_added_up(two_ranks: TwoRanks) -> None:
    end = End(two_ranks)
    end.step(0, 0.0, 0.0)
    assert end.log.times.busy == [[0.0, 1.0]]


def test_one_rank_alone_needs_no_busy_times(context: SingleProcessContext) -> None:
    end = End(context)
    end.step(0, 0.0)
    assert end.log.times.busy == []


# -- this rank's flags ----------------------------------------------------------------------------


def test_one_process_without_a_request_sends_no_flags(context: SingleProcessContext) -> None:
    assert End(context).end.flags() is NO_FLAGS


def test_a_signal_and_a_due_save_are_one_flag(context: SingleProcessContext) -> None:
    end = End(context)
    with end.end.signals:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert end.end.flags() == RankFlags(float(signal.SIGUSR2))
        end.saver.time_is_up = True
        assert end.end.flags() == RankFlags(signal.SIGUSR2 + SAVE)


def test_several_ranks_always_send_how_long_they_worked(two_ranks: TwoRanks) -> None:
    assert End(two_ranks).end.flags() == RankFlags(0.0, 1.5)


# -- checks and resumes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "total", "ended", "allow", "complete"),
    [
        (Position(4), 5, None, [], False),
        (Position(5), 5, None, [], True),
        (Position(6), 5, None, [], True),
        (Position(9, epoch=2), None, None, [], False),
        (Position(9, epoch=3), None, None, [], True),
        (Position(2), 5, "done", [], False),  # it was shorter then
        (Position(2), 5, "no better val_loss", [], True),
        (Position(2), 5, "no better val_loss", ["early_stopping"], False),
        (Position(5), 5, "no better val_loss", ["early_stopping"], True),
    ],
)
def test_a_resumed_run_knows_whether_it_is_complete(
    context: SingleProcessContext,
    position: Position,
    total: int | None,
    ended: str | None,
    allow: list[str],
    complete: bool,
) -> None:
    end = End(context, resume={"allow": allow})
    end.saver.ended = ended
    assert end.end.is_complete(position, total) is complete


def test_survivors_learn_of_a_boundary_before_the_ranks_act_together(two_ranks: TwoRanks) -> None:
    end = End(two_ranks, check_ranks_every=1)
    end.end.watched = ([nn.Linear(1, 1)], [])
    two_ranks.other = {}
    with pytest.raises(RanksDiffer):
        end.step(3, 0.0, 0.0, total=4)
    assert end.boundaries.reached_all == [(Position(4, 0, 4), PLAN, "done")]
