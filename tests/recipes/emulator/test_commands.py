"""The whole recipe on little data, by the command that runs it: one run at any number of ranks, and what comes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.processes import run
from tests.distributed.running import rows_of
from tests.recipes.emulator.small import COMMON, CONFIG, RECIPE, SIZES, script
from tests.recipes.importing import fork_commands

pytestmark = pytest.mark.usefixtures("recipe")


@pytest.mark.requirement("002-M3-2", "002-X-1b", "002-X-2b")
def test_the_recipe_from_fields_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, for all of it is about the same trainings."""
    folder = tmp_path / "whole"
    run_recipe(folder, monkeypatch)
    assert_one_two_and_four_ranks_are_one_run_of_shares(folder)
    assert_one_file_has_the_best_weights(folder / "runs" / "emulator")
    assert_a_run_ends_with_its_jacobian(folder / "runs" / "still")
    assert_the_page_shows_everything(folder / "results.html")
    assert_a_run_begins_again_at_its_best(folder)


def run_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run.py`, whose commands are forked by a process that has torch imported."""
    import run as recipe

    # So wide that every Jacobian counts as still; and one evaluation sooner than the run ends by itself.
    wide = ("tolerance: 0.02, patience: 3, least_evaluations: 5", "tolerance: 9, patience: 3, least_evaluations: 4")
    fork_commands(monkeypatch, lambda word: word.replace(*wide))
    assert recipe.main([str(folder), "--no-cpp", *SIZES, *COMMON, "epochs=5"]) == 0
    monkeypatch.undo()


def assert_one_two_and_four_ranks_are_one_run_of_shares(folder: Path) -> None:
    worlds = {world: folder / "proof" / "verify" / f"world-{world}" for world in (1, 2, 4)}
    held = {
        world: [rank["patterns"] for rank in json.loads((run_dir / "files" / "memory.json").read_text())]
        for world, run_dir in worlds.items()
    }
    assert {world: len(ranks) for world, ranks in held.items()} == {1: 1, 2: 2, 4: 4}
    (whole,) = held[1]
    assert whole > 160
    for world, ranks in held.items():
        assert sum(ranks) == whole, "each pattern is on one rank"
        assert max(ranks) <= whole / world + 8
    evaluations = [[row for row in rows_of(path) if "val_loss" in row] for path in worlds.values()]
    assert len(evaluations[0]) >= 2
    assert "jacobian/sensitivity/sst" in evaluations[0][0]
    assert evaluations[0] == evaluations[1] == evaluations[2]


def assert_one_file_has_the_best_weights(run_dir: Path) -> None:
    assert [path.name for path in run_dir.rglob("best_model*")] == ["best_model.pt"]
    found = torch.load(run_dir / "files" / "best_model.pt")
    assert found["config"]["name"] == "emulator"
    assert found["history"][-1]["val_loss"] < found["history"][0]["loss"]
    state = found["model_state_dict"]
    assert state["input_mean"].shape == (14,)
    assert (state["output_std"] != 1).all()


def assert_a_run_ends_with_its_jacobian(run_dir: Path) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "stopped_early"
    assert result["reason"] == "the Jacobian has changed by less than 9 in each of 3 evaluations"
    assert len(list(run_dir.rglob("best_model*"))) == 1


def assert_the_page_shows_everything(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for heading in ("Training", "The Jacobian", "Predictions and Jacobians beside the truth", "Ranks", "C++"):
        assert f"<h2>{heading}</h2>" in text
    assert "All are one run, to the bit." in text
    assert "It ended after" in text


def assert_a_run_begins_again_at_its_best(folder: Path) -> None:
    """On two ranks of torchrun, then alone. Where the highest loss counts as the best, it is not the last."""
    words = ("--config", CONFIG, *COMMON, "name=again", "params.jacobian_samples=0", "best.mode=max")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    first = run([*torchrun, *map(str, (RECIPE / "scripts" / "train.py", *words))], cwd=folder)
    assert first.returncode == 0, first.stderr
    assert "gloo backend, 2 processes" in first.stderr
    run_dir = folder / "runs" / "again"
    result = json.loads((run_dir / "result.json").read_text())
    best = result["best"]["step"]
    assert best < result["steps"]
    done = script("scripts/train.py", "--restart-from-best", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert f"step-{best:08d}: step {best}" in done.stderr + done.stdout
    assert json.loads((run_dir / "result.json").read_text())["loss"] == result["loss"]
    assert len(list((run_dir / "files").glob("best_model*"))) == 1


def test_words_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    wrong = script("scripts/train.py", "--config", CONFIG, "params.loss=l3", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "params.loss is 'l3': give mse, mae, huber" in wrong.stderr
    both = script("scripts/train.py", "--restart-from-best", "--restart-from-checkpoint", "x", cwd=tmp_path)
    assert both.returncode == 2
    assert "not allowed with argument" in both.stderr
