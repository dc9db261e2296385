"""The whole recipe on little data, by the command that runs it: one run at any number of ranks, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from samestep.errors import TaskError
from tests.cli.processes import samestep
from tests.recipes.importing import fork_commands, newest
from tests.recipes.token_classification.small import COMMON, TRAIN, script

WORDS = ("--nproc", "2", "--train", "48", "--valid", "19", "--epochs", "2")


@pytest.mark.requirement("001-G-1", "001-T-3", "001-S6-1")
@pytest.mark.usefixtures("recipe")
def test_the_recipe_from_documents_to_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, for all of it is about the same trainings."""
    folder = tmp_path / "whole"
    run_recipe(folder, monkeypatch)
    assert_one_two_and_four_ranks_are_one_run(folder)
    assert_one_process_trains_and_measures_the_same(folder)
    assert_every_entity_of_the_whole_set_is_counted_once(folder)
    assert_the_search_found_what_the_final_training_used(folder)
    assert_transformers_loads_the_folder(folder)
    assert_predictions_are_spans_of_characters(folder)
    assert_the_page_shows_everything(folder / "results.html")


def run_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run.py`, whose commands are forked by a process that has torch imported."""
    import run as recipe

    fork_commands(monkeypatch)
    assert recipe.main([str(folder), *WORDS, *COMMON]) == 0
    monkeypatch.undo()


def measured(run_dir: Path) -> dict[str, float]:
    """The last evaluation."""
    found: dict[str, float] = json.loads((run_dir / "result.json").read_text())["metrics"]
    return found


def assert_one_two_and_four_ranks_are_one_run(folder: Path) -> None:
    proof = samestep(
        "verify", TRAIN, *COMMON, "run_dir=proof", "--worlds", "1,2,4", "--steps", "2", "--json", cwd=folder
    )
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert len({w["state_hash"] for w in json.loads(proof.stdout)["worlds"].values()}) == 1


def assert_one_process_trains_and_measures_the_same(folder: Path) -> None:
    done = samestep("train", TRAIN, *COMMON, "epochs=2", "run_dir=alone", cwd=folder)
    assert done.returncode == 0, done.stderr
    two, one = folder / "runs" / "entities", folder / "alone"
    assert [json.loads((r / "plan.json").read_text())["world"] for r in (two, one)] == [2, 1]
    assert measured(two) == measured(one)
    assert {"macro_f1", "entity_f1", "per_entity/NAME/f1", "val_loss"} <= measured(one).keys()
    mine, other = newest(two), newest(one)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def assert_every_entity_of_the_whole_set_is_counted_once(folder: Path) -> None:
    lines = (folder / "data" / "valid.jsonl").read_text().splitlines()
    assert len(lines) == 19, "which neither two nor four ranks share evenly"
    values = measured(folder / "runs" / "entities")
    support = [value for name, value in values.items() if name.endswith("/support")]
    assert len(support) == 8
    assert sum(support) == sum(len(json.loads(line)["annotations"]) for line in lines)


def assert_the_search_found_what_the_final_training_used(folder: Path) -> None:
    status = samestep("show", "smoke", "--json", cwd=folder)
    trials = json.loads(status.stdout)["trials"]
    assert [trial["state"] for trial in trials] == ["complete", "complete"]
    assert all(trial["value"] == sum(trial["folds"]) / 2 for trial in trials)
    best = max(trials, key=lambda trial: trial["value"])
    config = json.loads((folder / "runs" / "final" / "config.json").read_text())
    assert config["optimizer"]["lr"] == best["params"]["optimizer.lr"]
    assert config["params"]["dropout"] == best["params"]["params.dropout"]
    result = json.loads((folder / "runs" / "final" / "result.json").read_text())
    assert (result["status"], result["metrics"]) == ("finished", {})
    assert result["steps"] == 2 * 5, "67 documents in batches of 16, twice"


def assert_transformers_loads_the_folder(folder: Path) -> None:
    from task import Entities
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    loaded = AutoModelForTokenClassification.from_pretrained(folder / "model")
    trained = newest(folder / "runs" / "final")
    assert loaded.state_dict().keys() == trained.keys(), "nothing is named module. something"
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.state_dict().items())
    assert loaded.config.id2label[1] == "B-DESIGNATION"
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer("Ada")["input_ids"][0] == tokenizer.cls_token_id
    again = Entities(data=str(folder / "data"), checkpoint=str(folder / "model"), dropout=0.2)
    again.prepare_data()
    model = again.model()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    longer = Entities(data="none", checkpoint=str(folder / "model"), max_length=129)
    with pytest.raises(TaskError, match=r"params\.max_length is 129, and .* reads 128 tokens at most"):
        longer.model()
    assert 0.2 in {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}


def assert_predictions_are_spans_of_characters(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in (folder / "data" / "valid.jsonl").read_text().splitlines()]
    assert [row["document"] for row in rows] == list(range(19))
    for row, text in zip(rows, texts, strict=True):
        for start, end, _ in row["entities"]:
            assert text[start:end] == text[start:end].strip() != ""


def assert_the_page_shows_everything(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for heading in ("Training", "Each type of entity", "Search", "ONNX and int8", "Documents"):
        assert f"<h2>{heading}</h2>" in text
    assert "entities-int8.onnx" in text
    assert "tokens get the same label from both" in text
    plain, small = (page.parent / "runs/entities/export/entities.onnx", page.parent / "entities-int8.onnx")
    assert small.stat().st_size < plain.stat().st_size


@pytest.mark.requirement("001-X-1")
def test_searches_go_by_the_name_of_a_profile(tmp_path: Path) -> None:
    unknown = script("local_sweeps.py", "large", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "the profile is 'large': give one of full, smoke" in unknown.stderr
    for profile in ("full", "smoke"):
        refused = script("local_sweeps.py", profile, "trials=0", cwd=tmp_path)
        assert refused.returncode == 2
        assert f"{profile}.yaml has 1 mistake" in refused.stderr, "the file itself is right"
        assert "trials" in refused.stderr
