"""samestep cv: a run for each fold, resumed where it failed; every sample predicted once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import samestep

TASK = """
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from samestep import Task

HERE = Path(__file__).parent

class Small(Task):
    def model(self):
        return nn.Linear(2, 1)

    def train_data(self):
        x = torch.linspace(-1, 1, 24).view(12, 2)
        return TensorDataset(x, torch.arange(12) % 3)

    def optimizers(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(self, model, batch):
        if (HERE / "broken").exists() and 0 in self.valid_data().indices:
            raise RuntimeError("this fold is broken")
        return (model(batch.x)[:, 0] - batch.y).square().sum(), len(batch)
"""


def config(folder: Path) -> Path:
    (folder / "small_cv_task.py").write_text(TASK)
    path = folder / "small.yaml"
    path.write_text(
        "task: small_cv_task.py:Small\nglobal_batch: 4\nlanes: 2\nepochs: 2\n"
        "distributed: {device: cpu, threads_per_rank: 1}\n"
    )
    return path


def test_folds_are_trained_kept_and_put_together(tmp_path: Path) -> None:
    path, folder = config(tmp_path), tmp_path / "runs" / "small-cv"
    (tmp_path / "broken").touch()
    first = samestep("cv", path, "--folds", "3", cwd=tmp_path)
    assert first.returncode == 1, first.stderr
    assert "1 of 3 folds failed" in first.stderr
    assert "this fold is broken" in first.stderr
    (tmp_path / "broken").unlink()

    def trained() -> dict[str, float]:
        return {path.parent.name: path.stat().st_mtime for path in folder.glob("*/result.json")}

    before = trained()
    again = samestep("cv", path, "--folds", "3", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert sum(trained()[name] == time for name, time in before.items()) == 2
    assert [fold["status"] for fold in found["folds"]] == ["finished"] * 3
    losses = [fold["metrics"]["val_loss"] for fold in found["folds"]]
    assert abs(found["mean"]["val_loss"] - sum(losses) / 3) < 1e-12
    assert json.loads((folder / "cv.json").read_text()) == found
    rows = [json.loads(line) for line in (folder / "out_of_fold.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(12))
    made = json.loads((folder / "folds.json").read_text())
    assert all(row["index"] in made["folds"][row["fold"]] for row in rows)
    assert made["made"]["stratify"] == "by_label"
    other = samestep("cv", path, "--folds", "3", "seed=4", cwd=tmp_path)
    assert other.returncode == 2
    assert "config.seed was 0, is 4" in other.stderr


@pytest.mark.variation("test_folds_are_trained_kept_and_put_together: on two ranks")
@pytest.mark.requirement("001-G-2")
def test_two_ranks_come_to_the_same_values(tmp_path: Path) -> None:
    path, means = config(tmp_path), []
    for ranks in ("1", "2"):
        options = ["--directory", ranks, "--nproc", ranks, "--file", "f.json", "--no-predict"]
        done = samestep("cv", path, "--folds", "2", *options, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        means.append(json.loads(done.stdout)["mean"])
    assert means[0] == means[1]


def test_too_many_folds_are_refused_before_anything_trains(tmp_path: Path) -> None:
    path = config(tmp_path)
    done = samestep("cv", path, "--folds", "5", "--stratify", "by_label", cwd=tmp_path)
    assert done.returncode == 2
    assert "0 has 4, 1 has 4, 2 has 4" in done.stderr
    assert not list(tmp_path.glob("runs/small-cv/fold-*/checkpoints"))
    folds = samestep("cv", path, "--folds", "3", "--only-split", "--file", "f.json", "--json", cwd=tmp_path)
    assert json.loads(folds.stdout)["sizes"] == [4, 4, 4]
    wrong = samestep("cv", path, "--folds", "4", "--file", "f.json", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "--folds is 4" in wrong.stderr
