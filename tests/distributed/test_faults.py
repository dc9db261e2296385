"""verify --explain names the place of a planted fault: step, lane and tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import ROOT, samestep
from tests.variations import variations

FAULTS = ROOT / "tests" / "distributed" / "faults.py"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "faulty.yaml"
    path.write_text(
        "global_batch: 32\nlanes: 8\nsteps: 4\n"
        "distributed: {threads_per_rank: 1, timeout: 60}\nevaluation: {every_epochs: null}\n"
    )
    return path


def suspect(config: Path, fault: str, *options: str) -> dict[str, Any]:
    done = samestep("verify", config, f"task={FAULTS}:{fault}", "--explain", "--json", *options, cwd=config.parent)
    assert done.returncode == 4, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["suspect"]
    return found


@pytest.mark.parametrize(
    ("fault", "step", "lane", "kind", "name"),
    variations(
        [
            ("RankSeededDraw", 0, 4, "output", "model.2"),
            ("RankDependentOrder", 0, 4, "samples", ""),
            ("NoisyLabels", 0, 4, "batch", "1"),
        ],
        kept=["RankSeededDraw", "RankDependentOrder"],
    ),
)
def test_a_fault_is_named_by_step_lane_and_tensor(
    config: Path, fault: str, step: int, lane: int, kind: str, name: str
) -> None:
    found = suspect(config, fault, "--worlds", "1,2")
    place = found["step"], found["lane"], found["kind"], found["name"]
    assert place == (step, lane, kind, name)
    assert found["between"] == "1 rank: rank 0; 2 ranks: rank 1"
    assert kind != "output" or found["ulp"] > 0


@pytest.mark.variation("test_a_fault_is_named_by_step_lane_and_tensor: traced from a checkpoint")
def test_a_buffer_that_no_loss_shows_is_traced_from_a_checkpoint(config: Path) -> None:
    found = suspect(config, "RankDependentBuffer", "--worlds", "1,3")
    # Only the final state differs: its last two steps are traced. Three ranks drive 3+3+2 lanes.
    assert (found["step"], found["lane"], found["kind"]) == (2, 3, "buffer")
    assert found["name"] == "model.2.seen"
    assert (config.parent / "runs/faulty/verify/explain/before/checkpoints/step-00000002").is_dir()


def test_ranks_that_end_differently_are_named_with_the_tensor_and_the_step(config: Path) -> None:
    done = samestep(
        "verify", config, f"task={FAULTS}:OptimizerNoise", "--worlds", "1,2", "--explain", cwd=config.parent
    )
    assert done.returncode == 4, done.stderr
    shown = " ".join(done.stdout.split())
    assert "first difference: step 0, model.conv.weight after the update" in shown
    assert "(2 ranks: ranks 0 and 1)" in shown
    assert "The same gradients gave another state" in shown
    page = (config.parent / "runs/faulty/verify/report.html").read_text()
    assert "first difference: step 0, model.conv.weight after the update" in page
    assert "states of the ranks from step 1 on, model.conv.weight on rank 1<" in page


def test_what_a_resumed_run_forgets_is_named(config: Path) -> None:
    found = suspect(config, "LaneGenerators", "--worlds", "1,2", "--resumed")
    assert (found["step"], found["lane"]) == (2, 0)
    assert (found["kind"], found["name"]) == ("input", "model")
    assert found["between"] == ("1 rank, not stopped: rank 0; 2 ranks, resumed at step 2: rank 0")


def test_a_broken_promise_offers_the_command_that_explains_it(config: Path) -> None:
    loop = ROOT / "tests" / "distributed" / "own_loop.py"
    done = samestep("verify", loop, "--worlds", "1,2", "--steps", "1", "--", "run", "--rank-seeded", cwd=config.parent)
    assert done.returncode == 4, done.stderr
    assert f"samestep verify {loop} --worlds 1,2 --steps 1 --explain -- run --rank-seeded\n" in done.stderr
    explained = samestep(
        "verify", loop, "--worlds", "1,2", "--steps", "1", "--explain", "--", "run", "--rank-seeded", cwd=config.parent
    )
    assert "step 0, lane 4, input of model" in " ".join(explained.stdout.split())
