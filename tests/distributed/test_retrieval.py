"""Retrieval: exact, the same at any number of ranks, and what a run can be judged by."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_model

import samestep
from samestep.config.evaluation import RETRIEVAL_METRICS
from samestep.evaluation import eval_rows
from tests.distributed import retrieval_tasks
from tests.distributed.running import Recorded, assert_same, rows_of, settings, train, train_rank
from tests.ranks import answers_of_ranks, run_ranks

TASKS = Path(retrieval_tasks.__file__)
NEAREST = [*RETRIEVAL_METRICS, "precision_at_3", "recall_at_4"]
ALL = [*NEAREST, "nmi", "ami"]


def judged(folder: Path, world: int, distributed: dict[str, Any] | None = None, **evaluation: Any) -> Recorded:
    return train(
        folder, world, f"{TASKS}:Judged", distributed=distributed or {},
        best={"metric": "precision_at_1", "mode": "max"},
        evaluation={"mode": "retrieval", **evaluation},
        ema={"decay": 0.9},
        checkpoint={"keep_best": 2},
    )  # fmt: skip


def measured(run: Recorded) -> list[dict[str, Any]]:
    return [row for row in rows_of(run.folder) if "precision_at_1" in row]


@pytest.mark.requirement("000-P3-4")
def test_embeddings_kept_in_half_precision_are_the_same_at_any_size_too(tmp_path: Path) -> None:
    runs = [judged(tmp_path / "half", world, keep_in="float16") for world in (1, 4)]
    rows = [measured(run) for run in runs]
    assert rows[0] == rows[1]
    whole = measured(judged(tmp_path, 1))
    for half, full in zip(rows[0], whole, strict=True):
        assert half["mean_reciprocal_rank"] == pytest.approx(full["mean_reciprocal_rank"], abs=0.02)


@pytest.mark.requirement("000-P3-2", "000-P3-5", "000-P3-7")
def test_a_run_is_judged_by_what_its_embeddings_find(tmp_path: Path) -> None:
    runs = [judged(tmp_path, world, metrics=NEAREST) for world in (1, 2, 4)]
    assert_same(runs)
    rows = [measured(run) for run in runs]
    assert rows[0] == rows[1] == rows[2]
    names = {*NEAREST, *(f"encoder/{name}" for name in NEAREST)}
    assert {*names, *(f"ema_{name}" for name in names)} <= rows[0][-1].keys()
    task, last = retrieval_tasks.Judged(), runs[2].folder / "checkpoints" / "step-00000006"
    model = task.model().eval()
    load_model(model, last / "model.safetensors")
    (x, y), (rx, ry) = task.valid_data().tensors, task.reference_data("train").tensors
    with torch.no_grad():
        views = [(model(x), model(rx)), (model.body(x), model.body(rx))]
    for prefix, (queries, references) in zip(("", "encoder/"), views, strict=True):
        expected = samestep.retrieval.measure(queries, y, references, ry, NEAREST)
        found = {name: rows[0][-1][prefix + name] for name in NEAREST}
        assert found == pytest.approx(expected, abs=2e-3)
    best = max(row["precision_at_1"] for row in rows[0])
    manifest = json.loads((last / "manifest.json").read_text())
    assert manifest["best"]["value"] == best


def _average(folder: str) -> Any:
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware
    from samestep.models.checkpoint_average import average_run
    from samestep.run.run_dir import config_of

    config = config_of(Path(folder), [])
    with create_run_context(config, detect_hardware()) as context:
        return average_run(Path(folder), config, context, 2, "best").values


@pytest.mark.variation("test_a_run_is_judged_by_what_its_embeddings_find: among the queries")
def test_neighbours_among_the_queries_themselves(tmp_path: Path) -> None:
    runs = [judged(tmp_path, world, reference="valid", views=["encoder"], distance="euclidean") for world in (1, 4)]
    assert measured(runs[0]) == measured(runs[1])
    averages = [*run_ranks(_average, 1, str(runs[0].folder))]
    averages += run_ranks(_average, 2, str(runs[1].folder))
    assert averages[0] == averages[1] == averages[2], "a mean of checkpoints is judged alike"
    assert averages[0].keys() == set(RETRIEVAL_METRICS)
    assert 0.2 < measured(runs[0])[-1]["precision_at_1"] < 1.0, "no sample is its own neighbour"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "view": ({"views": ["heat"]}, "there is no view heat: eval_embed returns head, encoder"),
    "crops": ({}, "(samples, size), and the view embedding of eval_embed is float32 (4, 1, 12)"),
    "no pairs": ({}, "Judged's samples are no pairs of input and class: define labels"),
    "floats": ({}, "a whole number for each sample, its class, as a tensor, and got torch.float32"),
    "huge": ({"keep_in": "float16"}, "and evaluation.keep_in is float16, which ends at 6.55e+04"),
    "one class": ({}, "retrieval found one class only"),
    "empty": ({"reference": "empty"}, "reference data holds no samples"),
    "other": ({"reference": "other"}, "Judged does not know the reference 'other'"),
    "nothing": ({"reference": "nothing"}, "Judged.reference_data('nothing') returned None"),
    "NoEmbeddings": ({}, "evaluation.mode is retrieval, and NoEmbeddings has no embeddings"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_mistakes(kind: str, tmp_path: Path) -> None:
    evaluation, message = WRONG[kind]
    task = kind if kind == "NoEmbeddings" else "Judged"
    config = settings(
        f"{TASKS}:{task}", tmp_path / "run", epochs=1, params={"kind": kind},
        best={"metric": "precision_at_1", "mode": "max"},
        evaluation={"mode": "retrieval", **evaluation},
    )  # fmt: skip
    for ok, text in answers_of_ranks(train_rank, 1, config, str(tmp_path / "record")):
        assert not ok
        assert "TaskError" in text
        assert message in text


def gathered(folder: Path, kind: str = "") -> dict[str, Any]:
    return settings(
        f"{TASKS}:Gathered", folder, params={"kind": kind}, best={"metric": "spread"}, evaluation={"mode": "gather"}
    )


@pytest.mark.requirement("000-P3-3")
def test_a_metric_of_the_whole_set_is_computed_once_for_all_ranks(tmp_path: Path) -> None:
    found = []
    for world in (1, 2, 4):
        folder = tmp_path / str(world)
        run_ranks(train_rank, world, gathered(folder), str(folder / "record"))
        found.append([row for row in rows_of(folder) if "spread" in row])
    assert found[0] == found[1] == found[2]
    assert [len(row["by/mean"]) for row in found[0]] == [4, 4]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("short", "eval_outputs must return tensors with a row for each of a batch's 4 samples"),
        ("nothing", "evaluate_gathered must return values by name"),
    ],
)
def test_mistakes_in_what_is_gathered(kind: str, message: str, tmp_path: Path) -> None:
    answers = answers_of_ranks(train_rank, 1, gathered(tmp_path / "run", kind), str(tmp_path / "rec"))
    assert [ok for ok, _ in answers] == [False]
    assert message in answers[0][1]


def _own_loop(folder: str, lanes: int) -> Any:
    """Blocks of queries and of references on each of four ranks; nobody is a multiple of anything."""
    config = {
        "global_batch": 40, "lanes": lanes, "steps": 1, "run_dir": folder, "evaluation": {"batch": 50},
        "distributed": {"threads_per_rank": 1, "timeout": 600},
    }  # fmt: skip
    queries = retrieval_tasks.made_set(1111, 5)
    # Whole numbers: many distances are equal.
    references = retrieval_tasks.made_set(8300, 6).tensors
    references = torch.utils.data.TensorDataset(references[0].round(), references[1])
    with samestep.start(config) as run:
        model = torch.nn.Linear(6, 2)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch.no_grad():
            model.weight.copy_(torch.arange(12).view(2, 6) % 5 - 2)
            model.bias.zero_()
        lines: list[str] = []
        printed = mock.patch.object(run.context.log, "main", lines.append)
        with mock.patch.object(eval_rows, "_WORTH_A_LINE", 0), printed:
            spoiled = run.retrieval(queries, queries, lambda batch: batch.x / (0.0 if 1110 in batch.ids else 1.0))
        assert lines[0].startswith("Retrieval of 1,111 queries among 1,111 references, embeddings of 6")
        assert all(math.isnan(value) for value in spoiled.values()), "wherever that sample is"
        return [
            run.retrieval(
                queries, others, lambda batch: {"raw": batch.x, "model": model(batch.x)},
                metrics=ALL, distance=distance, prefix="own_",
            )
            for others, distance in ((references, "cosine"), (None, "euclidean"))
        ]  # fmt: skip


@pytest.mark.variation("test_embeddings_kept_in_half_precision_are_the_same_at_any_size_too, in a loop")
def test_a_loop_of_ones_own_has_the_same_bits_on_every_rank_at_any_size(tmp_path: Path) -> None:
    found = [
        values
        for world, lanes in ((1, 4), (2, 4), (4, 8))
        for values in run_ranks(_own_loop, world, str(tmp_path / f"{world}"), lanes)
    ]
    assert all(values == found[0] for values in found)
    names = {f"own_{prefix}{name}" for prefix in ("", "model/") for name in ALL}
    assert [set(values) for values in found[0]] == [names, names]
    queries, labels = retrieval_tasks.made_set(1111, 5).tensors
    alone = samestep.retrieval.measure(queries, labels, metrics=ALL, distance="euclidean")
    assert {name: found[0][1][f"own_{name}"] for name in ALL} == alone
