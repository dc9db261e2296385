"""The plan of a run: printed, stored, and compared on resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.config import load_config
from samestep.data.factory import open_source
from samestep.distributed.context import SingleProcessContext
from samestep.errors import CheckpointError, Stopped
from samestep.run.plan_report import report_plan
from samestep.run_setup import RunSetup
from tests.unit.contexts import TwoRanks
from tests.unit.train.own_loops import Noisy, Streams, settings, train, train_part


def report(
    context: SingleProcessContext, folder: Path, dataset: Any = None, modules: Sequence[nn.Module] = (), **values: Any
) -> Any:
    base = {"global_batch": 8, "lanes": 4, "epochs": 2, "run_dir": str(folder)}
    setup = RunSetup.create(load_config({**base, **values}), context)
    source = open_source(setup, TensorDataset(torch.zeros(20)) if dataset is None else dataset)
    total = source.steps_per_epoch and 2 * source.steps_per_epoch
    return report_plan(setup, source, total, None, modules)


def test_the_plan_is_printed_and_stored(
    context: SingleProcessContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = report(context, tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text()) == plan
    assert (plan["samples"], plan["steps"], plan["lane_batch"], plan["world"]) == (20, 6, 2, 1)
    assert capsys.readouterr().err == (
        "Plan: 20 samples, global batch 8 = 4 lanes x 2 samples; 1 rank drives 4 lanes; 6 steps; same: bits\n"
    )


def test_streams_have_no_number_of_samples_or_steps(
    context: SingleProcessContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = report(context, tmp_path, Streams())
    assert (plan["samples"], plan["steps"]) == (None, None)
    assert "Plan: global batch 8 = 4 lanes x 2 samples; " in (text := capsys.readouterr().err)
    assert "; unknown steps;" in text


def test_every_ranks_share_is_in_the_plan(
    two_ranks: TwoRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = report(two_ranks, tmp_path, distributed={"lane_weights": [3, 1]})
    assert plan["lanes_per_rank"] == [3, 1]
    assert "2 ranks drive 3+1 lanes" in capsys.readouterr().err


def test_a_chosen_precision_is_reported_with_its_reason(
    context: SingleProcessContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(context, tmp_path, precision="auto")
    assert "precision fp32: auto: CPUs" in capsys.readouterr().err


def test_a_run_over_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train_part(settings(tmp_path), 2, Noisy(22))
    with pytest.raises(CheckpointError, match="samples"), samestep.start(settings(tmp_path)) as run:
        train(run, Noisy(24))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"lanes": 8}, "a lane has 1 sample, and BatchNorm"),
        ({"global_batch": 12, "lanes": 4, "samples": 22}, "the last lane of an epoch has 1 sample"),
        ({"global_batch": 12, "lanes": 4, "samples": 22, "drop_last": True}, ""),
        ({}, ""),
    ],
)
def test_one_sample_alone_under_batchnorm_is_warned_about(
    context: SingleProcessContext,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    expected: str,
) -> None:
    data = TensorDataset(torch.zeros(values.pop("samples", 20)))
    report(context, tmp_path, data, [nn.Sequential(nn.BatchNorm1d(2))], **values)
    printed = capsys.readouterr().err
    assert f"Warning: {expected}" in printed if expected else "Warning" not in printed
    report(context, tmp_path, data, [nn.Linear(2, 2)], **values)
    assert "Warning" not in capsys.readouterr().err
