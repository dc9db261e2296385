"""`samestep predict` as a person types it, alone and under torchrun."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from sklearn.datasets import load_digits

from tests.cli.processes import ROOT, samestep, torchrun
from tests.predicting import finished_run


def test_digits_are_predicted_the_same_alone_and_on_two_ranks(tmp_path: Path) -> None:
    trained = samestep(
        "train", ROOT / "recipes" / "digits" / "config.yaml", "name=digits", "epochs=1",
        "distributed.threads_per_rank=1", cwd=tmp_path,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    alone = samestep("predict", "runs/digits", "valid", "--output", "alone.csv", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout == "360 samples, step 23: alone.csv\n"
    two = torchrun("predict", "runs/digits", "valid", "--output", "two.csv", "--json", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    printed = json.loads(two.stdout)
    assert (printed["world"], printed["samples"], printed["columns"]) == (2, 360, ["index", "output"])
    assert (tmp_path / "alone.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    assert accuracy(tmp_path / "two.csv") == pytest.approx(evaluated(tmp_path / "runs/digits"))


def accuracy(path: Path) -> float:
    """How often the highest of ten scores is the label's."""
    with path.open(newline="") as file:
        scores = [[float(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]]
    labels = load_digits().target[::5]
    right = [max(range(10), key=row.__getitem__) == y for row, y in zip(scores, labels, strict=True)]
    return sum(right) / len(right)


def evaluated(run: Path) -> float:
    (manifest,) = (run / "checkpoints").glob("step-*/manifest.json")
    return float(json.loads(manifest.read_text())["metrics"]["accuracy"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "valid", "--which", "7"], "--which is '7': run has best, last and the steps 3"),
        (["run", "valid", "seeds=1"], "seeds (override): is not a key of this config"),
        ([".", "valid"], ". is not a run's directory"),
        (["run", "valid", "--embeddings"], "Scores has no embeddings: define eval_embed"),
    ],
)
def test_mistakes_end_with_2_and_without_a_traceback(arguments: list[str], message: str, tmp_path: Path) -> None:
    finished_run(tmp_path / "run")
    done = samestep("predict", *arguments, "--output", "x.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("x.csv*"))
