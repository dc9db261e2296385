"""A run as a custom loop uses it: prepare, steps, evaluate, save, stop and resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import samestep
from samestep.checkpoint.listing import list_checkpoints
from samestep.checkpoint.manifest import verify_checkpoint
from samestep.errors import CheckpointError, OutOfMemory, StepError, Stopped
from samestep.optim.schedules import Schedule
from samestep.step.step import Step
from tests.unit.checkpoint.checkpoints import saved_steps
from tests.unit.train.own_loops import (
    Noisy,
    Streams,
    assert_equal,
    losses,
    net,
    prepared,
    settings,
    squares,
    train,
    train_part,
)

# -- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [1, 3, 4])
@pytest.mark.parametrize(
    "dataset", [Noisy, Streams, lambda: Streams(stateful=True)], ids=["map", "streams", "stateful streams"]
)
def test_a_resumed_run_is_the_untouched_run_to_the_bit(tmp_path: Path, dataset: Any, pause: int) -> None:
    whole, parts = settings(tmp_path / "whole"), settings(tmp_path / "parts")
    with samestep.start(whole) as run:
        expected = train(run, dataset())
        assert run.start_step == 0
    with pytest.raises(Stopped, match=f"--stop-after stopped the run after step {pause}"):
        train_part(parts, pause, dataset())
    with samestep.start(parts) as run:
        assert run.start_step == pause
        assert_equal(train(run, dataset()), expected)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 6


def test_schedules_and_kept_objects_resume_too(tmp_path: Path) -> None:
    class Counter:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    def part(pause: int | None) -> tuple[list[tuple[float, ...]], int]:
        records: list[tuple[float, ...]] = []

        class Rates(samestep.RunListener):
            def on_record(self, record: samestep.StepRecord) -> None:
                records.append(record.lr)

        counter, model = Counter(), net()
        optimizer = SGD(model.parameters(), lr=1.0)
        try:
            with samestep.start(settings(tmp_path)) as run:
                run.add_listener(Rates())
                run.prepare(model, optimizer, Schedule(StepLR(optimizer, 2, gamma=0.5)))
                run.register("counter", counter)
                if pause is not None:
                    run.pause_after(pause)
                for step in run.steps(Noisy()):
                    step.train(lambda batch: (0 * model(batch.x).sum(), len(batch)))
                    counter.value += 1
        except Stopped:
            assert pause is not None
        return records, counter.value

    assert part(pause=3) == ([(1.0,), (1.0,), (0.5,)], 3)
    assert part(pause=None) == ([(0.5,), (0.25,), (0.25,)], 6)


def test_a_resumed_run_refuses_to_lose_what_was_kept(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path, epochs=1)) as run:
        run.register("extra", nn.Linear(1, 1))
        train(run)
    with (
        pytest.raises(CheckpointError, match=r"keeps the state of 'extra'.*run\.register"),
        samestep.start(settings(tmp_path, resume={"allow": ["epochs"]})) as run,
    ):
        train(run)


def test_a_complete_run_has_nothing_left_to_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with samestep.start(settings(tmp_path)) as run:
        expected = train(run)
    with samestep.start(settings(tmp_path)) as run:
        assert_equal(train(run, each=lambda step: pytest.fail("no step is left")), expected)
    assert "The run is complete: 6 steps. Nothing to train" in capsys.readouterr().err


def test_draws_between_lanes_are_those_of_the_untouched_run(tmp_path: Path) -> None:
    drawn: dict[str, list[float]] = {"whole": [], "parts": []}

    def loop(name: str, pause: int | None) -> None:
        with samestep.start(settings(tmp_path / name)) as run:
            if pause is not None:
                run.pause_after(pause)
            model, _ = prepared(run)
            for step in run.steps(Noisy()):
                drawn[name].append(torch.rand(()).item())
                step.train(squares(model))
                drawn[name].append(torch.rand(()).item())

    loop("whole", None)
    with pytest.raises(Stopped):
        loop("parts", 2)
    loop("parts", None)
    assert drawn["parts"] == drawn["whole"]
    assert len(set(drawn["whole"])) == 12


# -- preparing ------------------------------------------------------------------------------------


def test_initial_weights_follow_from_the_seed_alone(tmp_path: Path) -> None:
    def weights(number: int, seed: int) -> Tensor:
        torch.manual_seed(number)
        with samestep.start(settings(tmp_path / str(number), seed=seed)) as run:
            return prepared(run)[0].state_dict()["0.weight"]

    assert torch.equal(weights(0, seed=1), weights(1, seed=1))
    assert not torch.equal(weights(2, seed=1), weights(3, seed=2))


def test_prepare_gives_the_objects_back_in_their_order(tmp_path: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    with samestep.start(settings(tmp_path)) as run:
        assert run.prepare(optimizer, schedule, model) == (optimizer, schedule, model)
        assert run.model is model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.model, r"there is no model yet: call run\.prepare first"),
        (lambda run: next(run.steps(Noisy())), r"run\.steps came before run\.prepare"),
        (lambda run: run.evaluate(Noisy(), None), r"an evaluation came before run\.prepare"),
        (lambda run: run.save({"a": 1.0}), r"run\.save belongs inside the loop over the training data"),
        (lambda run: (train(run), run.save({"a": 1.0})), r"run\.save belongs inside"),
        (lambda run: (prepared(run), list(run.steps(Noisy()))), r"step 0 was left without step\.train"),
        (
            lambda run: (prepared(run), next(run.steps(Noisy())), run.save()),
            r"run\.save came before the update of step 0",
        ),
        (lambda run: (prepared(run), prepared(run)), r"run\.prepare was called twice"),
        (lambda run: run.register("x", object()), r"run\.register\('x'\) got a object"),
    ],
)
def test_calls_that_come_too_early_or_twice_are_refused(tmp_path: Path, call: Any, message: str) -> None:
    with samestep.start(settings(tmp_path)) as run, pytest.raises(StepError, match=message):
        call(run)


@pytest.mark.parametrize("steps", [1, 4, 5])
def test_an_epoch_that_the_runs_end_cuts_ends_as_any_other(tmp_path: Path, steps: int) -> None:
    seen, data = [], Noisy()
    with samestep.start(settings(tmp_path, epochs=None, steps=steps)) as run:
        model, _ = prepared(run)
        for epoch in run.epochs():
            for step in run.steps(data):
                step.train(squares(model))
            run.save({"epoch": epoch})
            seen.append((epoch, step.index, step.ends_run))
    assert seen[-1][1:] == (steps - 1, True)
    assert all(not ends for _, _, ends in seen[:-1])
    found = list_checkpoints(tmp_path / "checkpoints", checksums=True)[-1]
    assert (found.step, found.manifest.metrics["epoch"]) == (steps, seen[-1][0])


@pytest.mark.parametrize(
    ("values", "lr"),
    [
        ({}, 0.1),
        ({"lr_scaling": "linear", "base_batch": 2}, 0.4),
        ({"lr_scaling": "sqrt", "base_batch": 2}, 0.2),
        ({"base_batch": 2}, 0.1),
    ],
)
def test_rates_are_scaled_by_the_global_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], lr: float
) -> None:
    with samestep.start(settings(tmp_path, **values)) as run:
        assert run.scaled_lr(0.1) == pytest.approx(lr)
    assert ("multiplied by" in capsys.readouterr().err) is ("lr_scaling" in values)


# -- the length of a run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dataset", "total"),
    [
        ({}, Noisy, 6),
        ({"drop_last": True}, Noisy, 4),
        ({"epochs": None, "steps": 5}, Noisy, 5),
        ({}, Streams, None),
        ({"steps_per_epoch": 2}, Streams, 4),
        ({"epochs": None, "steps": 5}, Streams, 5),
    ],
)
def test_the_number_of_steps_is_known_where_the_data_has_a_length(
    tmp_path: Path, values: dict[str, Any], dataset: Any, total: int | None
) -> None:
    with samestep.start(settings(tmp_path, **values)) as run:
        source = run.source(dataset())
        assert run.total_steps(source) == total


@pytest.mark.parametrize(
    ("values", "dataset", "last"),
    [
        ({}, Noisy, 5),
        ({"epochs": None, "steps": 4}, Noisy, 3),
        ({}, Streams, 5),
        ({"epochs": None, "steps": 4}, Streams, 3),
    ],
)
def test_a_step_knows_that_it_is_the_last(tmp_path: Path, values: dict[str, Any], dataset: Any, last: int) -> None:
    found: list[int] = []
    with samestep.start(settings(tmp_path, **values)) as run:
        source = run.source(dataset())
        total = run.total_steps(source)
        assert not run.is_last_step(total)

        def look(step: Step) -> None:
            if run.is_last_step(total):
                found.append(step.index)

        train(run, source, look)
    assert found == [last]


def test_a_run_stops_with_the_step_that_requested_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    with samestep.start(settings(tmp_path)) as run:

        def each(step: Step) -> None:
            seen.append(step.index)
            if step.index == 2:
                run.stop("it is good enough")

        train(run, each=each)
    assert seen == [0, 1, 2]
    assert saved_steps(tmp_path)[-1] == 3
    assert verify_checkpoint(tmp_path / "checkpoints" / "step-00000003").ended == "it is good enough"
    with samestep.start(settings(tmp_path)) as run:
        train(run, each=lambda step: pytest.fail("it had ended"))
    assert "complete: 3 steps, stopped by it is good enough" in capsys.readouterr().err
    seen.clear()
    with samestep.start(settings(tmp_path, resume={"allow": ["early_stopping"]})) as run:
        train(run, each=lambda step: seen.append(step.index))
    assert seen == [3, 4, 5]


# -- saving and stopping --------------------------------------------------------------------------


def test_metrics_and_the_best_go_into_the_checkpoint_of_their_step(tmp_path: Path) -> None:
    values = {"checkpoint": {"every_epochs": None, "every_steps": None}}
    with samestep.start(settings(tmp_path, **values)) as run:

        def each(step: Step) -> None:
            if step.index == 1:
                run.record_metrics({"val_loss": 0.25}, best=True)
            if step.index == 3:
                run.record_metrics({"val_loss": 0.5})

        train(run, each=each)
    assert saved_steps(tmp_path) == [2, 6], "a new best is saved at once, other metrics wait"
    first, last = (verify_checkpoint(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (2, 6))
    assert first.best is not None
    assert (first.best.step, first.best.value, first.measured) == (2, 0.25, 2)
    assert (dict(last.metrics), last.measured, last.ended) == ({"val_loss": 0.5}, 4, "done")
    assert last.best == first.best


def test_a_signal_saves_the_step_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def each(step: Step) -> None:
        if step.index == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with (
        pytest.raises(Stopped, match="SIGTERM stopped the run after step 4"),
        samestep.start(settings(tmp_path)) as run,
    ):
        train(run, each=each)
    assert signal.getsignal(signal.SIGTERM) == before
    assert saved_steps(tmp_path)[-1] == 4


def test_an_error_in_the_loop_passes_through_and_frees_the_run_directory(tmp_path: Path) -> None:
    def fail(step: Step) -> None:
        if step.index == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), samestep.start(settings(tmp_path)) as run:
        train(run, each=fail)
    with samestep.start(settings(tmp_path)) as run:
        assert run.start_step == 3, "the last checkpoint is that of the first epoch"


def test_too_little_memory_names_the_step_and_what_to_do(tmp_path: Path) -> None:
    def fail(step: Step) -> None:
        raise torch.OutOfMemoryError("tried to allocate 8 GiB\nand more")

    advice = r"in step 0, with 2 samples in a lane.*memory\.lane_split.*tried to allocate 8 GiB$"
    with pytest.raises(OutOfMemory, match=advice) as caught, samestep.start(settings(tmp_path)) as run:
        train(run, each=fail)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_too_little_memory_before_the_first_step_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="memory before the first step"), samestep.start(settings(tmp_path)) as run:
        raise torch.OutOfMemoryError("8 GiB" if run.start_step == 0 else "")


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_resumed_run_says_that_it_keeps_the_checkpoints_rates(
    scheduled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(rate: float, pause: int | None) -> str:
        model = net()
        optimizer = SGD(model.parameters(), lr=rate, momentum=0.9)
        schedule = [Schedule(StepLR(optimizer, 1, 0.5))] if scheduled else []
        with samestep.start(settings(tmp_path / "run")) as run:
            model, optimizer, *_ = run.prepare(model, optimizer, *schedule)
            for step in run.steps(Noisy()):
                step.train(squares(model))
                if step.index == pause:
                    run.stop("paused")
        return capsys.readouterr().err

    part(0.1, 1)
    said = part(0.1, 3)
    assert "The checkpoint's values stay" not in said
    said = part(0.3, None)
    assert "whatever the code says now: SGD: lr is 0.1, and not 0.3." in said


# -- who steps the optimizer ----------------------------------------------------------------------


def test_an_optimizer_that_a_loop_steps_itself_is_refused_while_the_run_is_open(tmp_path: Path) -> None:
    """As the loop was before it was ported: each rank would train on its own."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)

    def weights() -> list[Tensor]:
        return [param.detach().clone() for param in model.parameters()]

    with samestep.start(settings(tmp_path / "run")) as run:
        model, optimizer = run.prepare(model, optimizer)
        before = weights()
        model(torch.ones(4, 3)).sum().backward()
        with pytest.raises(StepError, match=r"SGD\.step\(\) was called, but the run steps this"):
            optimizer.step()
        assert all(map(torch.equal, weights(), before))
        for step in run.steps(Noisy()):
            step.train(squares(model))
    assert not all(map(torch.equal, weights(), before))
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()  # the run is over: it is the loop's own again
