"""Predictions of one process: what is in the file, and every mistake one can make."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from samestep.checkpoint.format import read_training
from samestep.data.batch import LaneBatch
from samestep.distributed.context import SingleProcessContext
from samestep.errors import CheckpointError, MissingExtraError, OutputError, PlanError, TaskError
from samestep.models.predict import Predicted, PredictRequest, columns_of, predict_once
from samestep.models.trained_model import load_trained
from tests.predicting import finished_run, points


@pytest.fixture(autouse=True)
def _path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a task file puts its folder on the path."""
    monkeypatch.syspath_prepend(".")


def predict(run: Path, data: str, output: Path, *overrides: str, **options: Any) -> Predicted:
    request = PredictRequest(run, data, output, overrides=overrides, **options)
    return predict_once(request, SingleProcessContext(threads=1))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def objects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(run: Path, samples: int, batch: int, **which: Any) -> Tensor:
    model = load_trained(run, **which).model
    with torch.no_grad():
        return torch.cat([model(part) for part in points(samples).split(batch)])


def test_a_tensor_is_written_in_order_and_reads_back_to_the_bit(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    done = predict(run, "valid", tmp_path / "new" / "p.csv")
    assert done == Predicted(str(tmp_path / "new" / "p.csv"), "csv", 37, ("index", "output"), 3, "raw", 1)
    written = rows(tmp_path / "new" / "p.csv")
    assert [int(row["index"]) for row in written] == list(range(37))
    assert list(written[0]) == ["index", "output_0", "output_1", "output_2"]
    read = torch.tensor([[float(row[f"output_{k}"]) for k in range(3)] for row in written])
    assert torch.equal(read, expected(run, 37, 4))
    assert names(tmp_path / "new") == ["p.csv"]


def test_json_lines_and_parquet_hold_the_same_values(tmp_path: Path) -> None:
    import pyarrow.parquet

    run = finished_run(tmp_path / "run")
    for kind in ("jsonl", "parquet"):
        done = predict(run, "noisy:21", tmp_path / f"p.{kind}", "params.gives=columns")
        assert done.columns == ("index", "scores", "half", "y", "tag")
    lines = objects(tmp_path / "p.jsonl")
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet")
    assert table.to_pylist() == lines
    assert [line["y"] for line in lines] == [7 * index for index in range(21)]
    assert lines[20]["tag"] == '"20", ä'
    types = {field.name: str(field.type) for field in table.schema}
    assert types == {"index": "int64", "scores": "list<element: float>", "half": "float", "y": "int64", "tag": "string"}


def test_lists_of_any_length_and_grids_are_kept_where_the_format_allows(tmp_path: Path) -> None:
    import pyarrow.parquet

    run = finished_run(tmp_path / "run", params={"gives": "ragged"})
    for kind in ("jsonl", "parquet"):
        predict(run, "valid", tmp_path / f"p.{kind}")
    lines = objects(tmp_path / "p.jsonl")
    assert [line["tokens"] for line in lines[:4]] == [[], [0], [0, 1], []]
    assert [line["maybe"] for line in lines[:3]] == [0.0, None, 2 / 3]
    assert torch.tensor(lines[5]["grid"]).shape == (3, 2)
    assert pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pylist() == lines
    with pytest.raises(TaskError, match=r"'tokens' holds lists of different lengths.*\.jsonl"):
        predict(run, "valid", tmp_path / "p.csv")


def test_inputs_need_no_targets(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    predict(run, "plain:10", tmp_path / "p.jsonl", batch=3)
    read = torch.tensor([line["output"] for line in objects(tmp_path / "p.jsonl")])
    assert torch.equal(read, expected(run, 10, 3))


def test_the_training_set_needs_no_hook(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    assert predict(run, "train", tmp_path / "p.csv").samples == 21


def test_what_is_drawn_follows_from_the_seed(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", params={"gives": "columns"})
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.rand(3)
        predict(run, "noisy:21", tmp_path / f"{name}.csv", f"seed={seed}")
    texts = [(tmp_path / f"{name}.csv").read_text() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


def test_best_last_or_any_step_gives_its_weights(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", steps=(2, 4, 6), best=4)
    for which, step in (("best", 4), ("last", 6), ("2", 2)):
        output = tmp_path / f"{which}.jsonl"
        assert predict(run, "valid", output, which=which).step == step
        read = torch.tensor([line["output"] for line in objects(output)])
        assert torch.equal(read, expected(run, 37, 4, which=str(step)))


def test_averaged_weights_are_loaded_from_where_they_are_kept(tmp_path: Path) -> None:
    def shifted(by: float) -> dict[str, Tensor]:
        return {"3.bias": torch.full((3,), by), "3.weight": torch.zeros(3, 8)}

    kept = {name: {"model": shifted(by)} for name, by in (("ema", 10.0), ("swa", 20.0))}
    run = finished_run(tmp_path / "run", kept=kept)
    save_file(shifted(30.0), run / "average.safetensors")
    for weights, value in (("ema", 10.0), ("swa", 20.0), ("average", 30.0)):
        output = tmp_path / f"{weights}.jsonl"
        assert predict(run, "valid", output, weights=weights).weights == weights
        assert {tuple(line["output"]) for line in objects(output)} == {(value,) * 3}


@pytest.mark.parametrize(
    ("weights", "words"),
    [("ema", "holds no ema weights"), ("average", "samestep average"), ("mean", "there are no weights 'mean'")],
)
def test_missing_weights_are_refused(weights: str, words: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    with pytest.raises(CheckpointError, match=words):
        predict(run, "valid", tmp_path / "p.csv", weights=weights)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", kept={"ema": {"model": {"3.bias": torch.zeros(4)}}})
    with pytest.raises(CheckpointError, match=r"(?s)step-00000003 does not fit .*3\.bias"):
        predict(run, "valid", tmp_path / "p.csv", weights="ema")


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    run, output = finished_run(tmp_path / "run"), tmp_path / "p.csv"
    output.write_text("mine")
    with pytest.raises(OutputError, match=r"p\.csv exists already: --force"):
        predict(run, "valid", output)
    assert output.read_text() == "mine"
    predict(run, "valid", output, force=True)
    assert len(rows(output)) == 37


def test_the_format_is_the_suffix_or_the_requested_one(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    assert predict(run, "valid", tmp_path / "p.CSV").format == "csv"
    assert predict(run, "valid", tmp_path / "p.txt", format="jsonl").format == "jsonl"
    assert len(objects(tmp_path / "p.txt")) == 37
    for output, requested in (("p.tsv", None), ("p", None), ("q.csv", "tsv")):
        with pytest.raises(OutputError, match="csv or jsonl or parquet"):
            predict(run, "valid", tmp_path / output, format=requested)


@pytest.mark.parametrize(
    ("gives", "kind", "words"),
    [
        ("short", "csv", "3 entries in column 'b' for the 4 samples 12 to 15"),
        ("renames", "csv", "columns were index, a, and from row 12 on they are index, b"),
        ("renames", "jsonl", "the same ones in every batch"),
        ("renames", "parquet", "the same ones in every batch"),
        ("retypes", "parquet", "'a' was of float and is of int64 from row 12 on"),
        ("mixed", "parquet", "'a' is not of one type of int64, as in the rows before"),
        ("reshapes", "csv", r"rows from 12 on have the cells index, a_0, a_1, unlike"),
        ("clash", "csv", "two columns would have one name"),
        ("one", "csv", "one number as column 'output'"),
        ("pair", "csv", "a dict as column 'a'"),
        ("nothing", "csv", "returned no columns"),
        ("index", "csv", "named a column 'index'"),
        ("odd", "jsonl", "a object in column 'a'"),
    ],
)
def test_invalid_predictions_are_refused(gives: str, kind: str, words: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", params={"gives": gives, "fails_at": 15})
    with pytest.raises(TaskError, match=words):
        predict(run, "valid", tmp_path / f"p.{kind}")
    assert names(tmp_path) == ["run"], "no half-written file remains"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("stream:4", "data to predict .stream:4. must have a length"),
        ("empty", "holds no samples: its length is 0"),
        ("valid", "Scores has no validation data"),
    ],
)
def test_data_that_cannot_be_predicted_are_refused(data: str, words: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", params={"gives": "no valid"})
    with pytest.raises(TaskError, match=words):
        predict(run, data, tmp_path / "p.csv")


def test_lane_weights_of_another_number_of_ranks_are_named(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", distributed={"lane_weights": [3, 1], "threads_per_rank": 1})
    with pytest.raises(PlanError, match=r"distributed\.lane_weights has 2 entries"):
        predict(run, "valid", tmp_path / "p.csv")
    predict(run, "valid", tmp_path / "p.csv", "distributed.lane_weights=null")


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"p\.csv could not be written"):
        predict(run, "valid", tmp_path / "file" / "p.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(OutputError, match=r"folder\.csv could not be written"):
        predict(run, "valid", tmp_path / "folder.csv", force=True)


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "run")
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    monkeypatch.setattr("samestep.models.tables.partial_of", lambda path: full)
    with pytest.raises(OutputError, match="No space left on device"):
        predict(run, "noisy:5000", tmp_path / "p.csv")
    assert names(tmp_path) == ["run"]


def test_parquet_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"\.\[parquet\]"):
        predict(run, "valid", tmp_path / "p.parquet")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool])
def test_numbers_keep_their_values(dtype: torch.dtype) -> None:
    value = torch.tensor([0.1, 3.0e-5, 1.0]).to(dtype)
    column = columns_of(value, LaneBatch(0, None, (0, 1, 2)))["output"]
    assert column.tolist() == value.tolist()
    assert column.dtype.itemsize in (1, 4, 8)


def test_extra_modules_predict_as_trained(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", "Headed")
    predict(run, "valid", tmp_path / "p.jsonl")
    head = read_training(tmp_path / "run" / "checkpoints" / "step-00000003")["modules"][0]
    trained = load_trained(run)
    (module,) = trained.extra_modules
    assert all(torch.equal(value, head[name]) for name, value in module.state_dict().items())
    with torch.no_grad():
        scores = module(trained.model(points(37)))
    written = [row["output"] for row in objects(tmp_path / "p.jsonl")]
    assert torch.allclose(torch.tensor(written), scores, atol=1e-6)


def test_a_buffer_that_moves_while_predicting_is_refused_by_name(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", "Headed", params={"counts": True})
    with pytest.raises(TaskError, match=r"extra module 1\.0\.num_batches_tracked \(BatchNorm1d\)"):
        predict(run, "valid", tmp_path / "p.jsonl")
    assert names(tmp_path) == ["run"]


def test_extra_modules_that_are_not_those_of_the_run_are_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", "Headed")
    config = json.loads((run / "config.json").read_text())
    config["task"] = config["task"].replace("Headed", "Scores")
    (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="it holds 1 extra modules"):
        load_trained(run, trust=True)


def test_embeddings_are_written_by_view(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", "Embeds")
    done = predict(run, "plain:9", tmp_path / "one.npy", "params.gives=only", kind="embeddings")
    assert done.columns == ("index", "embedding")
    done = predict(run, "plain:9", tmp_path / "z.npy", kind="embeddings", view="head")
    assert done.columns == ("index", "head")
    rows = np.load(tmp_path / "z.npy")
    assert (rows.shape, rows.dtype) == ((9, 3), np.float32)
    predict(run, "plain:9", tmp_path / "p.npy", which="3")
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "p.npy")), expected(run, 9, 4))


@pytest.mark.parametrize(
    ("task", "gives", "options", "message"),
    [
        ("Embeds", "both", {"kind": "embeddings"}, "there are the columns head, encoder: choose one"),
        ("Embeds", "both", {"kind": "embeddings", "view": "body"}, "there is no view body: eval_embed"),
        ("Embeds", "only", {"kind": "embeddings", "view": "head"}, "eval_embed returns embedding, as a"),
        ("Scores", "output", {"kind": "embeddings"}, "Scores has no embeddings: define eval_embed"),
        ("Scores", "reshapes", {}, "rows from 8 on are float32 (2,), unlike float32 (3,) before"),
        ("Scores", "mixed", {}, "column 'a' holds more than numbers of one shape"),
    ],
)
def test_mistakes_with_arrays_and_embeddings(
    task: str, gives: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = finished_run(tmp_path / "run", task, params={"gives": gives, "fails_at": 11})
    with pytest.raises(TaskError) as caught:
        predict(run, "valid", tmp_path / "z.npy", **options)
    assert message in str(caught.value)
    assert names(tmp_path) == ["run"]
