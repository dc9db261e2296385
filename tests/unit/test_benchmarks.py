"""The contest of benchmarks/peers.py: it runs, takes turns, and sees who trains something else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__("peers")


@pytest.fixture
def in_thread(peers: Any) -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:
        yield lambda train: peers.InThread(train, stack)


def test_peers_runs_and_writes_what_it_measured(tmp_path: Path) -> None:
    answer = tmp_path / "peers.json"
    done = subprocess.run(
        [
            sys.executable, str(BENCHMARKS / "peers.py"), "--quick", "--device", "cpu",
            "--workload", "mlp", "--contestants", "hand-written,samestep,bare-graph",
            "--rounds", "2", "--json", str(answer),
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "left out: bare-graph (needs a GPU)" in done.stdout
    found = json.loads(answer.read_text(encoding="utf-8"))
    assert found["left_out"] == {"bare-graph": "needs a GPU"}
    rows = {row["contestant"]: row for row in found["results"]}
    assert list(rows) == ["hand-written", "hand-written, in a thread", "samestep"]
    assert all(row["milliseconds"] > 0 and row["rounds"] == 2 for row in rows.values())
    reference = rows["hand-written"]
    assert reference["loss"] < reference["loss_before"] - 0.05
    for row in rows.values():
        assert row["agrees"]
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5)


def test_a_contestant_that_trains_something_else_is_named(peers: Any) -> None:
    contest = peers.open_contest(
        peers.workload_of("mlp", quick=True), torch.device("cpu"), fused=True, dropout=0.0
    )
    start = peers.reached_by(contest, contest.initial)
    fell_by = {"hand-written": 1.0, "fair": 0.995, "unfair": 0.98}
    reached = {
        name: peers.Reached(start.loss - fall, start.weights + fall)
        for name, fall in fell_by.items()
    }
    spent = dict.fromkeys(reached, torch.ones(2, 2, dtype=torch.float64))
    results = peers.results_of(contest, spent, reached, drops=False)
    assert [result.contestant for result in peers.disagreeing(results)] == ["unfair"]
    assert results[-1].apart == pytest.approx(0.02)
    assert "unfair trained something else" in "".join(peers.notes_on(results, {}))
    assert not peers.disagreeing(peers.results_of(contest, spent, reached, drops=True))


def test_a_loop_in_a_thread_goes_on_only_when_it_is_let(in_thread: Callable[..., Any]) -> None:
    made: list[int] = []

    def train(step_is_over: Callable[[], None]) -> None:
        for number in range(100):
            made.append(number)
            step_is_over()

    advance = in_thread(train)
    assert made == []
    advance(3)
    assert made == [0, 1, 2]
    advance(2)
    assert made == [0, 1, 2, 3, 4]


def test_what_goes_wrong_in_a_thread_is_raised_where_one_waits(
    in_thread: Callable[..., Any],
) -> None:
    def train(step_is_over: Callable[[], None]) -> None:
        step_is_over()
        raise ZeroDivisionError

    advance = in_thread(train)
    advance(1)
    with pytest.raises(ZeroDivisionError):
        advance(1)
    with pytest.raises(RuntimeError, match="ended before"):
        in_thread(lambda step_is_over: None)(1)
