"""Who is notified of what, and in which order."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import samestep
from samestep.data.batch import LaneBatch
from samestep.errors import Stopped
from samestep.lanes.random_streams import RngStreams
from samestep.step.step import Step
from samestep.tracking.listeners import Listeners, RunListener
from tests.unit.train.own_loops import Noisy, Streams, prepared, settings, squares, train, train_part

EVENTS = [name for name, value in inspect.getmembers(RunListener, inspect.isfunction) if name[0] != "_"]


class Recording(RunListener):
    """Notes every event, with the step it is about."""

    def __init__(self, name: str, events: list[Any]) -> None:
        self._name, self._events = name, events

    def on_batch(self, step: int, batch: LaneBatch) -> None:
        self._events.append((self._name, "on_batch", step, batch.lane))

    def after_update(self, step: Step) -> None:
        self._events.append((self._name, "after_update", step.index))

    def on_step(self, step: Step) -> None:
        self._events.append((self._name, "on_step", step.index))

    def on_record(self, record: samestep.StepRecord) -> None:
        self._events.append((self._name, "on_record", record.step))

    def on_evaluation(self, step: int, values: Any) -> None:
        self._events.append((self._name, "on_evaluation", step, dict(values)))

    def on_save(self, step: int, metrics: Any) -> None:
        self._events.append((self._name, "on_save", step, dict(metrics)))


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_reaches_every_listener_in_the_order_they_were_added(event: str) -> None:
    calls: list[Any] = []

    def noting(name: str) -> RunListener:
        listener = RunListener()
        setattr(listener, event, lambda *given: calls.append((name, given)))
        return listener

    every = Listeners(RngStreams(0, torch.device("cpu")))
    every.add(noting("first"))
    every.add(noting("second"))
    arguments = tuple(SimpleNamespace(index=0) for _ in inspect.signature(getattr(every, event)).parameters)
    getattr(every, event)(*arguments)
    assert calls == [("first", arguments), ("second", arguments)]


@pytest.mark.parametrize("event", EVENTS)
def test_a_listener_may_leave_any_event_alone(event: str) -> None:
    method = getattr(RunListener(), event)
    assert method(*inspect.signature(method).parameters) is None


@pytest.mark.parametrize("reads", [False, True])
def test_a_listener_that_reads_ids_of_streams_gets_digests(tmp_path: Path, reads: bool) -> None:
    class Reader(RunListener):
        needs_sample_ids = reads

        def on_batch(self, step: int, batch: LaneBatch) -> None:
            found.update(batch.ids)

    found: set[str] = set()
    with samestep.start(settings(tmp_path, epochs=1)) as run:
        train(run, Streams(), listener=Reader())
    assert len(found) == (22 if reads else 1)


def test_the_events_of_a_run_come_in_order(tmp_path: Path) -> None:
    events: list[Any] = []

    def measure(model: Any, batch: LaneBatch, metrics: Any) -> tuple[float, int]:
        return 2.0 * len(batch), len(batch)

    with samestep.start(settings(tmp_path, lanes=2, epochs=1, drop_last=True)) as run:
        for name in "ab":
            run.add_listener(Recording(name, events))
        model, _ = prepared(run)
        for step in run.steps(Noisy()):
            step.train(squares(model))
            if step.ends_epoch:
                run.save(run.evaluate(Noisy(), measure, step=step.index))  # type: ignore[arg-type]
    kinds = [event[1:] for event in events if event[0] == "a"]
    assert kinds == [
        ("on_batch", 0, 0), ("on_batch", 0, 1), ("after_update", 0), ("on_step", 0),
        ("on_batch", 1, 0), ("on_batch", 1, 1), ("after_update", 1), ("on_record", 0),
        ("on_record", 1), ("on_evaluation", 1, {"val_loss": 2.0}), ("on_step", 1),
        ("on_save", 2, {"val_loss": 2.0}),
    ]  # fmt: skip
    assert [event[0] for event in events] == ["a", "b"] * len(kinds)


def test_a_step_that_is_skipped_updates_nobody(tmp_path: Path) -> None:
    events: list[Any] = []
    values = {"on_nonfinite": "skip", "epochs": None, "steps": 3}
    with samestep.start(settings(tmp_path, **values)) as run:
        run.add_listener(Recording("a", events))
        model, _ = prepared(run)
        for step in run.steps(Noisy()):
            factor = float("nan") if step.index == 1 else 1.0
            step.train(lambda batch, f=factor: (f * model(batch.x).sum(), len(batch)))  # type: ignore[misc]
    assert len([event for event in events if event[1] == "after_update"]) == 2
    assert [event[2] for event in events if event[1] == "on_step"] == [0, 1, 2]


def test_an_error_of_a_listener_ends_the_run(tmp_path: Path) -> None:
    class Failing(RunListener):
        def on_step(self, step: Step) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), samestep.start(settings(tmp_path)) as run:
        train(run, listener=Failing())


def test_a_stop_is_saved_and_reported_before_it_is_raised(tmp_path: Path) -> None:
    events: list[Any] = []
    with pytest.raises(Stopped):
        train_part(settings(tmp_path), 1, listener=Recording("a", events))
    assert events[-1] == ("a", "on_save", 1, {})


class Ending(RunListener):
    """Notes the end of a run, or fails there."""

    def __init__(self, events: list[str], fails: bool = False) -> None:
        self._events, self._fails = events, fails

    def on_record(self, record: samestep.StepRecord) -> None:
        self._events.append("record")

    def on_end(self) -> None:
        self._events.append("end")
        if self._fails:
            raise ZeroDivisionError("too late")


def test_the_end_comes_after_everything_is_measured_and_not_after_a_stop(tmp_path: Path) -> None:
    events: list[str] = []
    with samestep.start(settings(tmp_path / "whole")) as run:
        train(run, listener=Ending(events))
    assert events == ["record"] * 6 + ["end"]
    events.clear()
    with pytest.raises(Stopped):
        train_part(settings(tmp_path / "stopped"), 2, listener=Ending(events))
    assert events == ["record"] * 2


def test_what_fails_at_the_end_fails_the_run_and_closes_it(tmp_path: Path) -> None:
    def run_to_the_end() -> None:
        with samestep.start(settings(tmp_path)) as run:
            train(run, listener=Ending([], fails=True))

    with pytest.raises(ZeroDivisionError, match="too late"):
        run_to_the_end()
    with samestep.start(settings(tmp_path)) as again:
        assert again.start_step == 6, "the directory is free, and everything was saved"


@pytest.mark.parametrize("draws", [0, 3])
def test_a_listener_leaves_the_loops_own_draws_alone(draws: int, tmp_path: Path) -> None:
    class Drawing(RunListener):
        def after_update(self, step: Step) -> None:
            torch.rand(draws)

    found: list[list[float]] = []
    for listener in (None, Drawing()):
        drawn: list[float] = []
        with samestep.start(settings(tmp_path / str(len(found)))) as run:
            train(run, each=lambda step, to=drawn: to.append(torch.rand(()).item()), listener=listener)  # type: ignore[misc]
        found.append(drawn)
    assert found[0] == found[1]
