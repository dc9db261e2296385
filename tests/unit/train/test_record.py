"""The exact record of a run, which verify compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import samestep
from samestep.checkpoint.state import RunState
from samestep.errors import Stopped
from samestep.run.state_tensors import state_tensors
from samestep.train.record import Recorder, RunRecord, hash_state, read_state
from tests.unit.train.own_loops import Noisy, Streams, losses, net, prepared, settings, squares


def record(folder: Path, dataset: Any = None, pause: int | None = None, **values: Any) -> RunRecord:
    """Train with a recorder; what it wrote is in `folder/record`."""
    with samestep.start(settings(folder, **values)) as run:
        Recorder(run, folder / "record")
        if pause is not None:
            run.pause_after(pause)
        model, _ = prepared(run)
        for step in run.steps(Noisy() if dataset is None else dataset):
            step.train(squares(model))
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
    assert (again.losses, again.samples, again.state_hash) == (first.losses, first.samples, first.state_hash)
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


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3, "rate": 0.5, "curve": [1.0, 2.0], "word": "a", "huge": 2**80, "no": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class Frozen(nn.Linear):
    """A module whose state leaves its bias out, as adapters leave out what they adapt."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **options)
        del found[options["prefix"] + "bias"]
        return found


def test_the_state_names_everything_that_the_run_has_prepared_and_keeps() -> None:
    model, outside = nn.Linear(2, 1), nn.Parameter(torch.ones(1))
    extra = nn.Sequential(Frozen(1, 1), nn.BatchNorm1d(1))
    extra[0].register_buffer("cache", torch.ones(1), persistent=False)
    inside, other = (Adam([*model.parameters(), extra[1].weight]), SGD([outside], lr=0.1, momentum=0.5))
    (model(torch.ones(1, 2)) * outside * extra[1].weight).sum().backward()
    inside.step()
    other.step()
    schedule = torch.optim.lr_scheduler.ConstantLR(inside)
    found = state_tensors(RunState([model, extra], [inside, other], [schedule], {"mine": Counter()}))
    groups = {name for name in found if ".group" in name}
    assert {"optimizer0.group0.lr", "optimizer0.group0.betas", "optimizer1.group0.lr"} <= groups
    schedules = {name for name in found if name.startswith("schedule0.")}
    assert "schedule0.last_epoch" in schedules
    assert set(found) - groups - schedules == {
        "model.weight", "model.bias",
        "extra0.0.weight", "extra0.0.bias",
        *(f"extra0.1.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
        *(f"optimizer0.{p}.{key}" for p in ("weight", "bias", "extra0.1.weight")
          for key in ("step", "exp_avg", "exp_avg_sq")),
        "optimizer1.parameter-0", "optimizer1.parameter-0.momentum_buffer",
        *(f"kept.mine.{key}" for key in ("seen", "rate", "curve", "word", "huge")),
    }  # fmt: skip
    assert found["kept.mine.curve"].dtype == torch.float64


def test_a_record_holds_the_buffers_of_extra_modules_and_the_number_of_threads(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path)) as run:
        Recorder(run, tmp_path / "record")
        model, extra = net(), nn.BatchNorm1d(3)
        run.prepare(model, extra, SGD([*model.parameters(), *extra.parameters()], lr=0.1))
        for step in run.steps(Noisy()):
            step.train(lambda batch: ((model(extra(batch.x))[:, 0] - batch.y).square().sum(), len(batch)))
    state = read_state(tmp_path / "record")
    assert state["extra0.running_mean"].abs().sum() > 0
    assert RunRecord.read(tmp_path / "record").threads == [1]


class Broken(Noisy):
    def __getitem__(self, index: int) -> Any:
        raise ZeroDivisionError


def test_a_run_that_fails_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        record(tmp_path, Broken())
    assert not (tmp_path / "record" / "record.json").exists()


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
