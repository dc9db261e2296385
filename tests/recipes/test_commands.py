"""The whole recipe on little data, by the command that runs it, and what its README says of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.browser.browser import answer_of, found_browser
from tests.cli.processes import samestep
from tests.distributed.running import rows_of
from tests.recipes.importing import fork_commands, newest
from tests.recipes.small import COMMON, FIRST, SECOND

CLASSES = {"circle", "cross", "ring", "square", "triangle"}


@pytest.mark.requirement("000-P3-6", "000-P5-4", "000-P5-5", "000-X-1")
@pytest.mark.usefixtures("recipe")
def test_the_recipe_from_images_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, for all of it is about the same two trainings."""
    run_recipe(tmp_path, monkeypatch)
    assert_one_process_trains_the_same_run(tmp_path)
    assert_one_two_and_four_ranks_are_one_run(tmp_path)
    assert_judged_by_what_averaged_embeddings_find(tmp_path)
    assert_the_second_stages_encoder_is_the_first_ones(tmp_path)
    assert_predicted_into_a_table(tmp_path / "labels.csv")
    assert_exported_for_another_program(tmp_path)
    assert_a_wrong_first_stage_is_refused(tmp_path)
    assert_the_page_shows_everything(tmp_path / "results.html", tmp_path)
    assert_the_second_stage_has_a_map_too(tmp_path)


def run_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run.py`, whose commands are forked by a process that has torch imported."""
    import run as recipe

    fork_commands(monkeypatch, codes=(0, 8))
    monkeypatch.chdir(folder)
    words = [folder, "--images", "shapes", "--per-class", "20", "--nproc", "2", *COMMON]
    assert recipe.main([str(word) for word in words]) == 0
    monkeypatch.undo()


def common(folder: Path) -> tuple[str, ...]:
    """What both stages were trained with, to train them again elsewhere."""
    return (*COMMON, f"params.data={folder / 'data'}")


def second(folder: Path) -> tuple[str, ...]:
    rate = json.loads((folder / "second" / "config.json").read_text())["optimizer"]["lr"]
    average = folder / "first" / "average.safetensors"
    return (*common(folder), f"params.first={average}", f"optimizer.lr={rate}")


def assert_one_process_trains_the_same_run(folder: Path) -> None:
    for config, words in ((FIRST, common(folder)), (SECOND, second(folder))):
        done = samestep("train", config, *words, f"run_dir={config.stem}-alone", cwd=folder)
        assert done.returncode == 0, done.stderr
        two, one = folder / config.stem, folder / f"{config.stem}-alone"
        assert [json.loads((r / "plan.json").read_text())["world"] for r in (two, one)] == [2, 1]
        losses = [[row["loss"] for row in rows_of(r) if "loss" in row] for r in (two, one)]
        assert losses[0] == losses[1]
        mine, other = newest(two), newest(one)
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def assert_one_two_and_four_ranks_are_one_run(folder: Path) -> None:
    for config, words in ((FIRST, common(folder)), (SECOND, second(folder))):
        done = samestep(
            "verify", config, *words, "run_dir=proof", "--worlds", "1,2,4", "--steps", "3", "--json", cwd=folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert len({w["state_hash"] for w in json.loads(done.stdout)["worlds"].values()}) == 1


def assert_judged_by_what_averaged_embeddings_find(folder: Path) -> None:
    measured = [row for row in rows_of(folder / "first") if "ema_precision_at_1" in row]
    assert len(measured) == 3
    assert all("ema_encoder/precision_at_1" in row for row in measured)


def assert_the_second_stages_encoder_is_the_first_ones(folder: Path) -> None:
    average, trained = (load_file(folder / "first" / "average.safetensors"), newest(folder / "second"))
    encoder = [name for name in trained if name.startswith("encoder.")]
    assert any("running_mean" in name for name in encoder)
    assert all(torch.equal(trained[name], average[name]) for name in encoder)


def assert_predicted_into_a_table(table: Path) -> None:
    with table.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert len(found) == 20
    assert {Path(row["file"]).parent.name for row in found} == CLASSES
    assert {row["label"] for row in found} <= CLASSES
    assert {name.removeprefix("p_") for name in found[0] if name.startswith("p_")} == CLASSES


def assert_exported_for_another_program(folder: Path) -> None:
    keys = {"epoch", "model_state_dict", "optimizer_state_dict"}
    for name in ("first.pt", "second.pt"):
        found = torch.load(folder / name, weights_only=True)
        assert found.keys() == keys
        assert not any(name.startswith("module.") for name in found["model_state_dict"])
    (folder / "host.yaml").write_text("img_size: 16\n")
    words = ("export", "first", "--to", "pt", "--output", "host.pt", "--weights", "ema", "--extra")
    done = samestep(*words, "config=@host.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = torch.load(folder / "host.pt", weights_only=True)
    assert found["config"] == {"img_size": 16}
    wrong = samestep(*words, "config", "--force", cwd=folder)
    assert (wrong.returncode, wrong.stderr) == (2, "samestep: --extra is 'config': write KEY=VALUE, or KEY=@FILE\n")


def assert_a_wrong_first_stage_is_refused(folder: Path) -> None:
    words = ("train", SECOND, *second(folder), "run_dir=refused")
    done = samestep(*words, "params.first=none", cwd=folder)
    assert done.returncode == 2
    assert "params.first is 'none', and there is no such file" in done.stderr
    wide = samestep(*words, "params.width=8", cwd=folder)
    assert wide.returncode == 2
    assert "holds another encoder than params.backbone and params.width say" in wide.stderr


def assert_the_page_shows_everything(page: Path, folder: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "Metric learning in two stages" in text
    if found_browser() is None:
        return
    seen = answer_of(
        page,
        """
        return { points: document.querySelectorAll(".scatter g:first-child circle").length,
                 charts: document.querySelectorAll(".chart .panel svg").length,
                 headings: [...document.querySelectorAll("h2")].map((one) => one.textContent) };
        """,
        folder,
    )
    assert (seen["points"], seen["charts"]) == (20, 5)
    assert seen["headings"][0] == "Stage 1: contrast"


def assert_the_second_stage_has_a_map_too(folder: Path) -> None:
    done = samestep("plot", "second", "--embeddings", "--maps", "pca", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["points"], made["maps"], made["view"]) == (20, ["PCA"], "embedding")
    assert "/data/valid/circle/" in (folder / "second" / "embeddings.html").read_text()
