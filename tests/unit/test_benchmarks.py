"""The contests of benchmarks/: they run, take turns, and see who trains something else."""

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
from benchmarks.in_thread import InThread

from samestep.bench.scaling import KeepingSettings

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__


def measured(script: str, options: str, folder: Path) -> tuple[Any, str]:
    """What a benchmark wrote as JSON, and what it printed."""
    answer = folder / "answer.json"
    words = [sys.executable, str(BENCHMARKS / script), *options.split(), "--json", str(answer)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(answer.read_text(encoding="utf-8")), done.stdout


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Any]]:
    with ExitStack() as stack:
        yield lambda train: InThread(train, stack)


@pytest.mark.variation("test_peers_runs_and_writes_what_it_measured, by the same harness")
def test_contrastive_tells_another_loss_from_the_same(tmp_path: Path) -> None:
    found, _ = measured("contrastive.py", "--quick --device cpu --worlds 2 --rounds 1", tmp_path)
    rows = {row["variant"]: row for row in found["results"]}
    expected = rows["gathered graph"]["loss"]
    for name in ("samestep, 1 lane a rank", "samestep, kept", "samestep, recomputed"):
        assert rows[name]["loss"] == pytest.approx(expected, abs=1e-3)
    assert abs(rows["loss of each rank"]["loss"] - expected) > 0.01


def test_peers_runs_and_writes_what_it_measured(tmp_path: Path) -> None:
    options = "--quick --device cpu --workload mlp --variants samestep,samestep-default,bare-graph --rounds 2"
    found, said = measured("peers.py", options, tmp_path)
    assert "left out: bare-graph (needs a GPU)" in said
    assert found["left_out"] == {"bare-graph": "needs a GPU"}
    rows = {row["variant"]: row for row in found["results"]}
    assert list(rows) == ["hand-written", "hand-written, in a thread", "samestep", "samestep-default"]
    assert all(row["milliseconds"] > 0 and row["rounds"] == 2 for row in rows.values())
    reference = rows["hand-written"]
    assert reference["loss"] < reference["loss_before"] - 0.05
    for row in rows.values():
        assert row["agrees"]
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5)


@pytest.mark.variation("test_peers_runs_and_writes_what_it_measured, by the same loops")
def test_step_parts_add_up_to_steps(tmp_path: Path) -> None:
    found, _ = measured("step_parts.py", "--worlds 2 --rounds 1 --samples 16", tmp_path)
    loops = found["2"]
    assert list(loops) == ["ddp", "samestep", "ddp again"]
    for name, rounds in loops.items():
        (parts,) = rounds
        step = parts.pop("step")
        # Of each part the slowest rank's: together at least a step.
        assert sum(parts.values()) >= 0.99 * step > 0
        assert (parts["exchange"] > 0) == (name == "samestep")
        assert all(parts[part] > 0 for part in ("data", "forward", "backward", "optimizer", "rest"))


def test_a_variant_that_trains_something_else_is_named(script: Callable[[str], Any]) -> None:
    peers = script("peers")
    contest = peers.open_contest(peers.workload_of("mlp", quick=True), torch.device("cpu"), fused=True, dropout=0.0)
    start = peers.reached_by(contest, contest.initial)
    fell_by = {"hand-written": 1.0, "fair": 0.995, "unfair": 0.98}
    reached = {name: peers.Reached(start.loss - fall, start.weights + fall) for name, fall in fell_by.items()}
    spent = dict.fromkeys(reached, torch.ones(2, 2, dtype=torch.float64))
    results = peers.results_of(contest, spent, reached, drops=False)
    assert [result.variant for result in peers.disagreeing(results)] == ["unfair"]
    assert results[-1].apart == pytest.approx(0.02)
    assert "unfair trained something else" in "".join(peers.notes_on(results, {}))
    assert not peers.disagreeing(peers.results_of(contest, spent, reached, drops=True))


@pytest.mark.variation("test_peers_runs_and_writes_what_it_measured, by the same harness")
def test_lanes_runs_and_compares_bits(tmp_path: Path) -> None:
    options = "--quick --device cpu --workload conv --variants default,8-eager,8-graph-4 --rounds 1 --log-every 7"
    found, said = measured("lanes.py", options, tmp_path)
    assert "8 lanes: one hash for default, 8-eager" in said
    graphs = ("bare-graph", "bare-graph, deterministic", "8-graph-4")
    assert found["left_out"] == dict.fromkeys(graphs, "needs a GPU")
    assert found["machine"]["log_every"] == 7
    rows = {row["variant"]: row for row in found["results"]}
    by_hand = ["hand-written", "hand-written, again", "hand-written, deterministic"]
    assert list(rows) == [*by_hand, "default", "8-eager"]
    assert all(row["milliseconds"] > 0 and row["rounds"] == 1 for row in rows.values())
    assert rows["default"]["lanes"] == rows["8-eager"]["lanes"] == 8
    assert rows["default"]["weights"] == rows["8-eager"]["weights"]
    assert rows["default"]["weights"] != rows["hand-written"]["weights"]


def test_lanes_names_other_bits_and_missed_goals(script: Callable[[str], Any]) -> None:
    lanes = script("lanes")
    workload = lanes.workload_of("mlp", quick=True)
    # Only its name matters here: there are goals on GPUs only, and nothing is computed.
    contest = lanes.open_contest(workload, torch.device("cuda"))
    start = 2.3
    names = ["hand-written", "bare-graph", "default", "1-eager", "1-graph", "8-graph-2"]
    seconds = dict(zip(names, [10.0, 1.0, 1.4, 10.5, 1.04, 1.4], strict=True))
    spent = {name: torch.full((2, 2), value).double() for name, value in seconds.items()}
    same = {name: lanes.Learned(start - 1, "a") for name in names}
    results = lanes.results_of(contest, spent, same, start)
    assert {r.variant: r.met for r in results if r.goal} == {"default": True, "1-eager": False, "1-graph": True}
    assert lanes.is_sound(results)

    other = {**same, "8-graph-2": lanes.Learned(start - 1, "b")}
    results = lanes.results_of(contest, spent, other, start)
    assert not lanes.is_sound(results)
    assert "8 lanes: not the same bits:[/] default a, 8-graph-2 b" in str(lanes.notes_on(results, {}))
    unfair = {**same, "default": lanes.Learned(start - 0.9, "a")}
    results = lanes.results_of(contest, spent, unfair, start)
    assert not lanes.is_sound(results)
    assert "default trained something else" in str(lanes.notes_on(results, {}))


def test_lanes_shares_a_gpu_among_as_many_as_fit(script: Callable[[str], Any]) -> None:
    lanes = script("lanes")
    everyone = [*lanes.BY_HAND, *lanes.OURS]
    small, large = (lanes.workload_of(key, quick=False) for key in ("gpt", "gpt-large"))
    assert [set(part) for part in lanes.parts_of(small, everyone)] == [set(everyone)]
    parts = lanes.parts_of(large, everyone)
    assert parts[0] == ("default", "loop", *lanes.BY_HAND)
    assert [name for part in parts for name in part if name in lanes.OURS] == [*lanes.OURS]


def test_a_variant_has_its_own_settings_of_torch_in_its_turns_only() -> None:
    seen: list[bool] = []

    def open_deterministic() -> Callable[[int], None]:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        return lambda number: seen.append(
            torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        )

    def open_plain() -> Callable[[int], None]:
        return lambda number: seen.append(
            torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic
        )

    strict = KeepingSettings(open_deterministic)
    assert not torch.are_deterministic_algorithms_enabled()
    plain = KeepingSettings(open_plain)
    for _ in range(2):
        strict(1)
        plain(1)
    assert seen == [True, False, True, False]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


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


def test_what_goes_wrong_in_a_thread_is_raised_where_one_waits(in_thread: Callable[..., Any]) -> None:
    def train(step_is_over: Callable[[], None]) -> None:
        step_is_over()
        raise ZeroDivisionError

    advance = in_thread(train)
    advance(1)
    with pytest.raises(ZeroDivisionError):
        advance(1)
    with pytest.raises(RuntimeError, match="ended before"):
        in_thread(lambda step_is_over: None)(1)


def test_retrieval_says_what_it_takes(script: Callable[[str], Any]) -> None:
    found = script("retrieval").retrieve(700, 8, 9)
    assert (found.rows, found.world) == (700, 1)
    assert 0 < found.values["precision_at_1"] < 1
    assert found.seconds > 0
    assert found.announced > 0


def test_sweep_compares_trials_round_by_round(script: Callable[[str], Any]) -> None:
    sweep = script("sweep")
    spent = {sweep.COLD: [40.0, 60.0, 50.0], sweep.WARM: [10.0, 12.0, 25.0]}
    cold, warm = sweep.results_of(spent, ranks=2, trials=5)
    assert (cold.times, cold.goal, cold.trials_per_minute) == (1.0, None, 6.0)
    assert (warm.times, warm.low, warm.high) == (4.0, 2.0, 5.0)
    assert sweep.cells_of(warm)[-2:] == ["2.0-5.0", ">= 3 met"]
    assert sweep.markdown([cold, warm]).count("\n") == 3
