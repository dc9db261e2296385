"""Both stages by the commands that the recipe's README names, on little data."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from samestep.train.record import RunRecord
from tests.cli.processes import samestep
from tests.recipes.small import COMMON, FIRST, SECOND, make_data, script


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and both stages trained on two ranks."""
    folder = tmp_path_factory.mktemp("recipe")
    make_data(folder)
    for words in (
        ("launch", FIRST, "--nproc", "2", *COMMON, "--record", folder / "first-record"),
        ("average", "runs/first", "--best", "2"),
        ("launch", SECOND, "--nproc", "2", *COMMON, "--record", folder / "second-record"),
    ):
        done = samestep(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_one_process_trains_the_same_run(trained: Path) -> None:
    for config, name in ((FIRST, "first"), (SECOND, "second")):
        record = trained / f"{name}-alone"
        done = samestep(
            "train", config, *COMMON, f"run_dir={name}-one", "--record", record, cwd=trained
        )
        assert done.returncode == 0, done.stderr
        two, one = RunRecord.read(trained / f"{name}-record"), RunRecord.read(record)
        assert (two.world, one.world) == (2, 1)
        assert two.losses == one.losses
        assert two.state_hash == one.state_hash


def test_stages_are_one_run_at_one_two_and_four_ranks(trained: Path) -> None:
    for config in (FIRST, SECOND):
        done = samestep(
            "verify", config, *COMMON, "run_dir=proof", "--worlds", "1,2,4", "--steps", "3", "--json",
            cwd=trained,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert len({w["state_hash"] for w in json.loads(done.stdout)["worlds"].values()}) == 1


def test_the_first_stage_is_judged_by_what_its_averaged_embeddings_find(trained: Path) -> None:
    rows = [
        json.loads(line)
        for line in (trained / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    ]
    measured = [row for row in rows if "ema_precision_at_1" in row]
    assert len(measured) == 2
    assert all("encoder/precision_at_1" in row for row in measured)


def test_the_second_stages_encoder_is_the_first_ones_to_the_bit(trained: Path) -> None:
    average = load_file(trained / "runs" / "first" / "average.safetensors")
    newest = max((trained / "runs" / "second" / "checkpoints").glob("step-*"))
    second = load_file(newest / "model.safetensors")
    encoder = [name for name in second if name.startswith("encoder.")]
    assert any("running_mean" in name for name in encoder)
    assert all(torch.equal(second[name], average[name]) for name in encoder)


def test_a_folder_is_predicted_into_a_table(trained: Path) -> None:
    done = samestep("predict", "runs/second", "images", "--output", "labels.csv", cwd=trained)
    assert done.returncode == 0, done.stderr
    with (trained / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    classes = {"circle", "cross", "ring", "square", "triangle"}
    assert len(rows) == 100
    assert rows[0]["file"] == "images/circle/00001.png"
    assert {row["label"] for row in rows} <= classes
    assert {name.removeprefix("p_") for name in rows[0] if name.startswith("p_")} == classes


def test_both_stages_have_a_page_of_embeddings(trained: Path) -> None:
    for run, view in (("runs/first", "encoder"), ("runs/second", "embedding")):
        done = samestep(
            "plot-embeddings", run, "--view", view, "--maps", "pca", "--json", cwd=trained
        )
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert (made["points"], made["maps"], made["view"]) == (20, ["PCA"], view)
        page = (trained / run / "embeddings.html").read_text(encoding="utf-8")
        assert "data/valid/circle/" in page
        assert 0 <= made["errors"] <= 20


def test_a_checkpoint_is_exported_for_another_program(trained: Path) -> None:
    (trained / "host.yaml").write_text("img_size: 16\n")
    done = samestep(
        "checkpoints", "export", "runs/first", "first.pt", "--weights", "ema",
        "--extra", "config=@host.yaml", cwd=trained,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.load(trained / "first.pt", weights_only=True)
    assert set(found) == {"epoch", "model_state_dict", "optimizer_state_dict", "config"}
    assert found["config"] == {"img_size": 16}
    assert not any(name.startswith("module.") for name in found["model_state_dict"])


def test_a_second_stage_without_a_first_is_refused(trained: Path) -> None:
    done = samestep("train", SECOND, *COMMON, "params.first=none", "run_dir=x", cwd=trained)
    assert done.returncode == 2
    assert "params.first is 'none', and there is no such file" in done.stderr
    wide = samestep("train", SECOND, *COMMON, "params.width=8", "run_dir=x", cwd=trained)
    assert wide.returncode == 2
    assert "holds another encoder than params.backbone and params.width say" in wide.stderr


def test_the_whole_recipe_refuses_a_folder_that_is_not_empty(trained: Path) -> None:
    done = script("run.py", trained, cwd=trained)
    assert done.returncode == 2
    assert "is not empty: --overwrite replaces it" in done.stderr
