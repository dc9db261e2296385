"""What a process is doing, and for how long."""

from __future__ import annotations

import pytest

from samestep.distributed.health.activity import COMPUTE, DATA, EXCHANGE, READING, SAVE, STARTING, Activity
from samestep.errors import PeerLost
from tests.unit.clock import Clock


def test_the_phases_add_up_to_the_time_that_passed(clock: Clock) -> None:
    activity = Activity()
    activity.begin_step(0)
    for phase, seconds in [(DATA, 1), (COMPUTE, 2), (EXCHANGE, 4), (COMPUTE, 8), (SAVE, 16)]:
        assert activity.enter(phase) in activity.seconds
        clock.now += seconds
    activity.end_step()
    clock.now += 100
    spent = {phase: seconds for phase, seconds in activity.seconds.items() if seconds}
    assert spent == {DATA: 1, COMPUTE: 10, EXCHANGE: 4, SAVE: 16}
    assert activity.busy == 11


def test_only_some_steps_are_timed(clock: Clock) -> None:
    activity = Activity()
    for step in range(17):
        activity.begin_step(step)
        activity.enter(DATA)
        clock.now += 1
        activity.enter(COMPUTE)
        activity.end_step()
    assert (activity.timed_steps, activity.seconds[DATA]) == (3, 3.0)
    with activity.during(SAVE):  # but this always is
        clock.now += 5
    assert activity.seconds[SAVE] == 5


def test_a_phase_inside_another_gives_it_back(clock: Clock) -> None:
    activity = Activity()
    assert activity.phase == STARTING
    activity.begin_step(0)
    with activity.during(SAVE):
        clock.now += 1
        with activity.waiting("broadcast"):
            assert activity.phase == EXCHANGE
            clock.now += 2
        assert activity.phase == SAVE
        clock.now += 4
    assert activity.phase == COMPUTE
    assert (activity.seconds[SAVE], activity.seconds[EXCHANGE], activity.seconds[COMPUTE]) == (5, 2, 0)


def test_what_failed_stays_where_it_failed() -> None:
    activity = Activity()
    with pytest.raises(KeyError), activity.during(SAVE), activity.during(READING):
        raise KeyError
    assert activity.phase == READING


def test_collectives_are_numbered_and_remembered() -> None:
    activity = Activity()
    for number in range(100):
        with activity.waiting(f"call {number}"):
            pass
    assert (activity.sequence, activity.collective) == (100, "call 99")
    assert list(activity.recent) == [(number + 1, f"call {number}") for number in range(36, 100)]
    with activity.waiting("call 99"), activity.waiting("another"):
        assert (activity.sequence, activity.collective) == (102, "another")
    assert list(activity.recent)[-2:] == [(101, "call 99"), (102, "another")]
    assert list(Activity().recent) == []
    assert Activity().collective == ""


def test_a_broken_connection_becomes_a_lost_peer() -> None:
    activity, error = Activity(), RuntimeError("[gloo] Connection closed by peer")
    with pytest.raises(PeerLost, match="lost another rank: ") as caught, activity.waiting("losses"):
        raise error
    assert caught.value.__cause__ is error
    assert activity.phase == EXCHANGE


@pytest.mark.parametrize("error", [ValueError("gloo"), RuntimeError("shapes do not match")])
def test_an_error_of_our_own_in_a_collective_stays_itself(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, Activity().waiting("losses"):
        raise error
    assert caught.value is error
