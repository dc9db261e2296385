"""Idioms that could depend on the number of ranks: identical at any, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from tests.distributed.idioms import BUFFERS
from tests.distributed.running import assert_same, settings, train, train_rank
from tests.ranks import answers_of_ranks, run_ranks
from tests.variations import variations

TASKS = Path(__file__).with_name("idioms.py")
MODELS = TASKS.parents[1] / "sameness" / "models"


def of(name: str, **values: Any) -> dict[str, Any]:
    # 90 samples: every third step has a tail, with a lane of one sample and empty ones.
    task = name if ":" in name else f"{TASKS}:{name}"
    return {"task": task, "steps": 5, "epochs": None, "log_every": 1, **values}


IDENTICAL: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (f"{MODELS}/followers.py:Buffers", {"kind": kind}) for kind in BUFFERS},
    "queue": (f"{MODELS}/followers.py:MoCo", {}),
    "teacher": (f"{MODELS}/followers.py:MomentumTeacher", {}),
    "complex weights": (f"{MODELS}/unusual.py:ComplexParameters", {}),
    "noise of an optimizer": (f"{MODELS}/unusual.py:OptimizerNoise", {}),
    "random rates": ("RandomRates", {}),
}


@pytest.mark.parametrize("name", variations(IDENTICAL, kept=["queue", "noise of an optimizer"]))
def test_one_two_and_four_ranks_are_one_run(name: str, tmp_path: Path) -> None:
    task, params = IDENTICAL[name]
    runs = [train(tmp_path, world, **of(task, params=params)) for world in (1, 2, 4)]
    assert_same(runs)
    for key, value in runs[0].state.items():
        if key.rpartition(".")[2] in ("mean", "queue"):
            assert value.abs().sum() > 0, "a buffer that never moves proves nothing"


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("SparseTable", {}, "parameter table got a sparse gradient"),
        (f"{MODELS}/followers.py:TeacherInForward", {}, "changed the parameters teacher.0.weight"),
        ("Disproportionate", {"loss_weights": {"fit": 1.0, "size": 1.0}}, "counts in one proportion"),
    ],
)
def test_what_one_rank_refuses_all_sizes_refuse(
    name: str, values: dict[str, Any], message: str, world: int, tmp_path: Path
) -> None:
    """On eight ranks every rank has one lane, and sees nothing odd by itself."""
    config = settings(folder=tmp_path / "run", **of(name, **values))
    answers = answers_of_ranks(train_rank, world, config, str(tmp_path / "record"))
    assert not any(ok for ok, _ in answers)
    assert any(message in text for _, text in answers)


def test_losses_with_names_and_clip_norms_of_groups(tmp_path: Path) -> None:
    weights = {"fit": 1.0, "size": 0.5}
    runs = [
        train(tmp_path, world, **of("Named", loss_weights=weights, evaluation={"every_steps": 5}))
        for world in (1, 2, 4)
    ]
    assert_same(runs)
    logs = [(run.folder / "metrics.jsonl").read_text().splitlines() for run in runs]
    rows = [[json.loads(line) for line in log] for log in logs]
    named = [[(row["loss/fit"], row["loss/size"]) for row in log if "loss" in row] for log in rows]
    assert named[0] == named[1] == named[2]
    for row in rows[0]:
        if "loss" in row:
            assert row["loss"] == pytest.approx(row["loss/fit"] + 0.5 * row["loss/size"])
    measured = next(row for row in rows[0] if "val_loss" in row)
    whole = measured["val_loss/fit"] + 0.5 * measured["val_loss/size"]
    assert measured["val_loss"] == pytest.approx(whole)
    assert (runs[1].folder / "files" / "ended.txt").exists()


def test_more_ranks_than_lanes_are_refused_before_they_meet(tmp_path: Path) -> None:
    config = settings("Everything", tmp_path / "run", lanes=2)
    answers = answers_of_ranks(train_rank, 3, config, str(tmp_path / "record"))
    assert [ok for ok, _ in answers] == [False] * 3
    for _, text in answers:
        assert "PlanError: 3 ranks but only 2 lanes" in text
        assert "init_process_group" not in text
    assert not (tmp_path / "run").exists()


def _sum(folder: str) -> list[list[float]]:
    values = {"global_batch": 6, "lanes": 6, "steps": 3, "run_dir": folder}
    distributed = {"threads_per_rank": 1, "device": "cpu"}
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.randn(10, 2, generator=torch.Generator().manual_seed(1)))
    found = []
    with samestep.start({**values, "distributed": distributed}) as run:
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _, (x,) in run.enumerate(data):
            whole = run.sum(x.mean(0))
            found.append(whole.tolist())
            optimizer.zero_grad()
            run.backward((model(x) * whole.sum()).sum(), count=x.size(0))
            optimizer.step()
    return found


def test_a_sum_over_lanes_is_the_same_at_any_size(tmp_path: Path) -> None:
    """Also in the second step, where four of six lanes are filled."""
    sums = [run_ranks(_sum, world, str(tmp_path / str(world))) for world in (1, 2, 4)]
    assert all(found == sums[0][0] for world in sums for found in world)
