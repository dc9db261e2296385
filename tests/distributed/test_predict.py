"""One file of predictions, whatever the number of ranks, lanes and loader processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from samestep.models.tables import FORMATS
from tests.predicting import finished_run
from tests.ranks import answers_of_ranks, run_ranks


def _predict(run: str, folder: str, data: str, formats: list[str], overrides: list[str], **options: Any) -> Any:
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware
    from samestep.models.predict import PredictRequest, predict_once
    from samestep.run.run_dir import config_of

    config = config_of(Path(run), overrides)
    with create_run_context(config, detect_hardware(), needs_lanes=False) as context:
        return [
            predict_once(
                PredictRequest(
                    Path(run), data, Path(folder) / f"p.{kind}", batch=4, overrides=tuple(overrides), **options
                ),
                context,
            )
            for kind in formats
        ]


@pytest.mark.requirement("000-P1-11")
def test_every_format_is_the_same_at_any_size(tmp_path: Path) -> None:
    """53 samples in batches of 4: a whole round of 8 lanes, and one that leaves ranks without."""
    run = finished_run(tmp_path / "run", params={"gives": "columns"}, precision="bf16")
    tables = [kind for kind in FORMATS if kind != "npy"]
    cases: dict[int, list[str]] = {
        1: [],
        2: ["loader.workers=2"],
        4: ["distributed.lane_weights=[5, 1, 1, 1]"],
        3: ["lanes=2"],  # more ranks than lanes
    }
    for world, overrides in cases.items():
        folder = tmp_path / str(world)
        said = run_ranks(_predict, world, str(run), str(folder), "noisy:53", tables, overrides)
        assert said.count(said[0]) == world, "every rank knows what was written"
        assert {done.samples for done in said[0]} == {53}
    for kind in tables:
        files = [(tmp_path / str(world) / f"p.{kind}").read_bytes() for world in cases]
        assert files.count(files[0]) == len(cases), kind
    lines = (tmp_path / "4" / "p.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(53))
    assert [json.loads(line)["y"] for line in lines] == [7 * index for index in range(53)]


@pytest.mark.variation("test_every_format_is_the_same_at_any_size: of embeddings")
def test_embeddings_are_the_same_at_any_size(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", "Embeds", precision="bf16")
    for world in (1, 2, 4):
        place = str(run), str(tmp_path / str(world))
        embed = partial(_predict, kind="embeddings")
        whole = run_ranks(embed, world, *place, "noisy:53", ["parquet", "csv"], [])[-1]
        encoded = run_ranks(partial(embed, view="encoder"), world, *place, "noisy:53", ["npy"], [])[-1]
        columns = [done.columns for done in (*whole, *encoded)]
        assert columns == [("index", "head", "encoder")] * 2 + [("index", "encoder")]
    for kind in ("parquet", "csv", "npy"):
        files = [(tmp_path / str(world) / f"p.{kind}").read_bytes() for world in (1, 2, 4)]
        assert files.count(files[0]) == 3, kind
    matrix = np.load(tmp_path / "4" / "p.npy")
    assert (matrix.shape, matrix.dtype) == ((53, 8), np.float32)
    table = pyarrow.parquet.read_table(tmp_path / "4" / "p.parquet")
    assert table["index"].to_pylist() == list(range(53))
    assert np.array_equal(np.array(table["encoder"].to_pylist(), np.float32), matrix)


def test_data_are_prepared_once_before_the_model(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", "Downloaded", params={"folder": str(tmp_path)})
    run_ranks(_predict, 2, str(run), str(tmp_path), "valid", ["csv"], [])
    assert (tmp_path / "downloaded").read_text() == "x"


def test_a_mistake_on_one_rank_ends_all_and_leaves_no_file(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", params={"gives": "short", "fails_at": 31})
    said = answers_of_ranks(_predict, 2, str(run), str(tmp_path), "valid", ["csv"], [])
    assert not any(ok for ok, _ in said)
    assert "for the 4 samples 28 to 31: return one per sample" in said[1][1]
    assert "rank 1 on " in said[0][1]
    assert "TaskError" in said[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_buffer_that_moves_on_some_ranks_ends_all_of_them(tmp_path: Path) -> None:
    """One sample: the other rank predicts nothing."""
    run = finished_run(tmp_path / "run", "Headed", params={"counts": True})
    answers = answers_of_ranks(_predict, 2, str(run), str(tmp_path), "plain:1", ["csv"], [])
    for ok, text in answers:
        assert not ok
        assert "TaskError: predicting changed buffers in evaluation mode: extra module 1" in text
    assert not (tmp_path / "p.csv").exists()
