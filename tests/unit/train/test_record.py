"""The exact record of a run, which verify compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import samestep
from samestep.errors import Stopped
from samestep.train.record import Recorder, RunRecord, final_state, hash_state, read_state
from tests.unit.train.own_loops import Noisy, Streams, losses, prepared, settings, squares


def record(folder: Path, dataset: Any = None, pause: int | None = None, **values: Any) -> RunRecord:
    """Train with a recorder; what it wrote is in `folder/record`."""
    with samestep.start(settings(folder, **values)) as run:
        recorder = Recorder(run)
        if pause is not None:
            run.pause_after(pause)
        model, optimizer = prepared(run)
        for step in run.steps(Noisy() if dataset is None else dataset):
            step.train(squares(model))
        recorder.write(folder / "record", model, [optimizer], {"val_loss": 0.5}, {})
    return RunRecord.read(folder / "record")


def test_a_record_holds_every_loss_and_a_digest_of_every_steps_samples(tmp_path: Path) -> None:
    found = record(tmp_path)
    assert (found.world, found.steps, found.start) == (1, 6, 0)
    assert found.losses == losses(tmp_path)
    assert len(set(found.samples)) == 6
    assert found.rank_hashes == [found.state_hash]
    assert found.state_hash == hash_state(read_state(tmp_path / "record"))
    assert found.seconds_per_step > 0


def test_the_record_is_the_same_for_the_same_run_only(tmp_path: Path) -> None:
    first, again = record(tmp_path / "a"), record(tmp_path / "b")
    other = record(tmp_path / "c", seed=4)
    assert (again.losses, again.samples, again.state_hash) == (
        first.losses, first.samples, first.state_hash,
    )  # fmt: skip
    assert other.state_hash != first.state_hash
    assert other.samples != first.samples


def test_samples_of_streams_are_distinguished_by_their_digests(tmp_path: Path) -> None:
    found = record(tmp_path, Streams())
    assert len(set(found.samples)) == 6


def test_a_resumed_run_records_all_losses_and_its_own_samples(tmp_path: Path) -> None:
    whole = record(tmp_path / "whole")
    with pytest.raises(Stopped):
        record(tmp_path / "parts", pause=2)
    found = record(tmp_path / "parts")
    assert (found.steps, found.start) == (6, 2)
    assert found.losses == whole.losses
    assert found.samples == whole.samples[2:]
    assert found.state_hash == whole.state_hash


def test_the_final_state_names_weights_states_averages_and_metrics() -> None:
    model, outside = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    inside, other = Adam(model.parameters()), SGD([outside], lr=0.1, momentum=0.5)
    (model(torch.ones(1, 2)) * outside).sum().backward()
    inside.step()
    other.step()
    found = final_state(model, [inside, other], {"val_loss": 0.5}, {"ema.weight": torch.ones(1)})
    assert set(found) == {
        "model.weight", "model.bias",
        *(f"optimizer0.{p}.{key}" for p in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")),
        "optimizer1.parameter-0", "optimizer1.parameter-0.momentum_buffer",
        "ema.weight", "metrics.val_loss",
    }  # fmt: skip
    assert found["metrics.val_loss"].dtype == torch.float64
    before = found["model.weight"].clone()
    nn.init.zeros_(model.weight)
    assert torch.equal(found["model.weight"], before), "a copy"


STATE = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 2.0000002]), "b": torch.tensor(3)},
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3)},
        {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor(3)},
        {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3, dtype=torch.int32)},
        {"a": torch.tensor([1.0, 2.0])},
    ],
    ids=["bits", "shape", "name", "type", "missing"],
)
def test_any_difference_changes_the_hash(other: dict[str, Tensor]) -> None:
    assert hash_state(other) != hash_state(STATE)


def test_the_hash_does_not_depend_on_the_order_of_names() -> None:
    assert hash_state(dict(reversed(STATE.items()))) == hash_state(STATE)


def test_zeros_of_both_signs_differ() -> None:
    assert hash_state({"a": torch.tensor(0.0)}) != hash_state({"a": torch.tensor(-0.0)})


def test_a_metric_may_be_lists_of_other_lengths() -> None:
    curves: Any = {"curve": [[0.5, 1.0], [2.0]]}
    found = final_state(nn.Linear(1, 1), [], curves, {})
    assert found["metrics.curve"].tolist() == [0.5, 1.0, 2.0]
