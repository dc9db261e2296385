"""Averages of weights: the arithmetic, what is averaged, and that nobody's own weights change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from samestep.checkpoint.snapshot import Snapshot
from samestep.config import load_config
from samestep.config.optim import EmaConfig, SwaConfig
from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import CheckpointError, ConfigError, StepError, TaskError
from samestep.optim.weight_average import Ema, RunningMean, Swa

ALONE = SoloCollectives(Activity())


class Tied(nn.Module):
    """Tied weights, BatchNorm, a mask with infinities and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.last(self.norm(self.first(x)))


def move(model: nn.Module, number: int) -> None:
    """One step of some training."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for param in model.parameters():
            param += torch.randn(param.shape, generator=generator)
    model.train()
    model(torch.randn(5, 3, generator=generator))


def ema_of(model: nn.Module, steps_per_epoch: int | None = None, **rule: Any) -> Ema:
    return Ema(model, EmaConfig(**rule), steps_per_epoch, ALONE)


def bits(model: nn.Module) -> dict[str, bytes]:
    state = model.state_dict()
    return {k: v.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for k, v in state.items()}


# -- the arithmetic ------------------------------------------------------------------------------


def test_the_moving_average_is_torchs() -> None:
    model = nn.Linear(4, 2)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(model)  # the first one copies
    ours = ema_of(model, decay=0.9, warmup=False)
    for number in range(5):
        with torch.no_grad():
            model.weight += number
        theirs.update_parameters(model)
        ours.update()
    state = ours.state_dict()["model"]
    assert torch.equal(state["weight"], theirs.module.weight)
    assert torch.equal(state["bias"], theirs.module.bias)


def test_warm_up_averages_little_at_first() -> None:
    ema = ema_of(nn.Linear(1, 1), decay=0.5, warmup=True)
    seen = []
    for _ in range(10):
        seen.append(ema.decay)
        ema.update()
    # As torch-ema, which counts the first update as 1.
    assert seen == [min(0.5, (1 + n) / (10 + n)) for n in range(1, 11)]
    assert seen[0] == 2 / 11
    assert seen[-1] == 0.5


@pytest.mark.parametrize(
    ("rule", "steps_per_epoch", "stays"),
    [
        ({"decay": 0.9}, None, 0.9),
        ({"decay": 0.9, "every": 3}, None, 0.9**3),
        ({"decay": 0.9, "per": "epoch"}, 40, 0.9 ** (1 / 40)),
        ({"decay": 0.9, "per": "epoch", "every": 8}, 40, 0.9 ** (8 / 40)),
    ],
)
def test_decay_per_step_and_per_epoch(rule: dict[str, Any], steps_per_epoch: int | None, stays: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    ema = ema_of(model, steps_per_epoch, warmup=False, **rule)
    assert ema.decay == pytest.approx(stays, rel=1e-15)
    start = model.weight.item()
    with torch.no_grad():
        model.weight += 1
    every = rule.get("every", 1)
    for _ in range(every):
        assert ema.state_dict()["model"]["weight"].item() == start
        ema.update()
    assert ema.state_dict()["model"]["weight"].item() == pytest.approx(start + 1 - stays, abs=1e-6)


def test_decay_per_epoch_needs_an_epochs_length() -> None:
    with pytest.raises(TaskError, match=r"set steps_per_epoch, or ema\.per: step"):
        ema_of(nn.Linear(1, 1), None, decay=0.9, per="epoch")


def test_the_running_mean_is_the_plain_mean() -> None:
    model, seen = nn.Linear(3, 3), []
    mean = RunningMean(model)
    for number in range(4):
        with torch.no_grad():
            model.weight += number
        seen.append(model.weight.detach().clone())
        mean.update()
    assert torch.allclose(mean.state_dict()["model"]["weight"], torch.stack(seen).mean(0))


def test_an_average_of_bf16_weights_does_not_stand_still() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1)
    ema = ema_of(model, decay=0.999, warmup=False)
    with torch.no_grad():
        model.weight.fill_(2)
    for _ in range(100):
        ema.update()  # each step is far below what bf16 can tell apart near 1
    kept = ema.state_dict()["model"]["weight"]
    assert kept.dtype == torch.float32
    assert kept.item() == pytest.approx(2 - 0.999**100, rel=1e-4)
    with ema.swapped():
        assert model.weight.dtype == torch.bfloat16
        assert model.weight.item() == pytest.approx(kept.item(), rel=1e-2)
    assert model.weight.item() == 2


# -- what is averaged ----------------------------------------------------------------------------


def test_counters_and_masks_are_the_models_and_statistics_are_averaged() -> None:
    model = Tied()
    ema = ema_of(model, decay=0.5, warmup=False)
    before = model.norm.running_mean.clone()
    move(model, 1)
    ema.update()
    state = ema.state_dict()["model"]
    assert state["seen"].item() == 5
    assert state["norm.num_batches_tracked"].item() == 1
    assert state["mask"].tolist() == [0.0, -torch.inf]
    assert torch.allclose(state["norm.running_mean"], (before + model.norm.running_mean) / 2)
    assert "last.weight" not in state, "tied to first.weight, and saved once as in a checkpoint"
    assert {k: v.dtype for k, v in state.items()}["norm.num_batches_tracked"] == torch.int64


@pytest.mark.parametrize("kind", ["ema", "mean"])
def test_the_models_own_weights_come_back_to_the_bit(kind: str) -> None:
    model = Tied()
    with torch.no_grad():
        model.first.weight[0, 0] = float("nan")  # bits, not values
    average: Ema | RunningMean = ema_of(model) if kind == "ema" else RunningMean(model)
    for number in range(3):
        move(model, number)
        average.update()
    raw = bits(model)
    with average.swapped():
        swapped = bits(model)
        model(torch.randn(4, 3))  # in training mode: changes statistics and the counter
    assert swapped["first.weight"] == swapped["last.weight"] != raw["first.weight"]
    assert swapped["norm.running_var"] != raw["norm.running_var"]
    assert bits(model) == raw


def test_they_come_back_after_an_exception() -> None:
    model = Tied()
    ema = ema_of(model)
    move(model, 1)
    ema.update()
    raw = bits(model)

    def interrupted() -> None:
        with ema.swapped():
            assert bits(model) != raw
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert bits(model) == raw


def test_a_mean_of_nothing_is_refused_and_changes_nothing() -> None:
    model = Tied()
    raw = bits(model)
    with pytest.raises(StepError, match="no mean of weights yet"), RunningMean(model).swapped():
        pass
    assert bits(model) == raw


# -- the state -----------------------------------------------------------------------------------


def test_a_saved_average_goes_on_where_it_was() -> None:
    one, other = Tied(), Tied()
    ema = ema_of(one, decay=0.8, every=2)
    for number in range(3):
        move(one, number)
        ema.update()
    saved = Snapshot().take(ema.state_dict())
    other.load_state_dict(one.state_dict())
    again = ema_of(other, decay=0.8, every=2)
    again.load_state_dict(saved)
    for number in range(3, 6):
        for model, average in ((one, ema), (other, again)):
            move(model, number)
            average.update()
    assert ema.decay == again.decay
    for name, tensor in ema.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name
    assert not torch.equal(saved["model"]["first.weight"], ema.state_dict()["model"]["first.weight"])


def test_a_saved_average_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="has no bias"):
        ema_of(nn.Linear(2, 2)).load_state_dict(ema_of(nn.Linear(2, 2, bias=False)).state_dict())


class Elsewhere(SoloCollectives):
    """Rank 1, to which rank 0 broadcasts sevens."""

    rank = 1

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.fill_(7)


def test_with_rank0_the_others_hold_nothing_and_get_it_for_a_block() -> None:
    model = Tied()
    rule = EmaConfig(policy="rank0")
    main = Ema(model, rule, None, ALONE)
    other = Ema(model, rule, None, Elsewhere(Activity()))
    move(model, 1)
    main.update()
    other.update()
    assert main.state_dict()["model"]
    assert other.state_dict()["model"] == {}
    other.load_state_dict(main.state_dict())
    assert other.state_dict()["model"] == {}
    assert other.decay == main.decay
    raw = bits(model)
    with other.swapped():
        assert (model.first.weight == 7).all()
        assert model.seen.item() == 5
    assert bits(model) == raw


# -- SWA's phase ---------------------------------------------------------------------------------


def swa_of(total: int | None = 10, steps_per_epoch: int | None = 5, **rule: Any) -> Swa:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Swa(model, SwaConfig(**rule), [optimizer], total, steps_per_epoch)


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        ({"start": 0.5, "every": 2}, [7, 9]),
        ({"start": 4, "every": 3}, [7, 10]),
        ({"start": 0.0, "every": 5}, [5, 10]),
        ({"start": 0.5, "every": "epoch"}, [10]),
        ({"start": 4, "every": "epoch"}, [5, 10]),
    ],
)
def test_when_weights_are_taken(rule: dict[str, Any], taken: list[int]) -> None:
    swa, seen = swa_of(**rule), []
    for step in range(1, 11):
        before = swa.updates
        swa.update()
        if step % 5 == 0:
            swa.end_epoch()
        if swa.updates > before:
            seen.append(step)
    assert seen == taken


@pytest.mark.parametrize(
    ("total", "epoch", "rule", "words"),
    [
        (10, 5, {"start": 10, "every": 1}, "begins after step 10 of 10"),
        (10, 5, {"start": 0.5, "every": 6}, "every 6 steps"),
        (9, 5, {"start": 5}, "the end of each epoch"),
        (None, None, {"start": 0.5}, "give the step that it begins at"),
    ],
)
def test_a_phase_that_takes_nothing_is_refused(
    total: int | None, epoch: int | None, rule: dict[str, Any], words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        swa_of(total, epoch, **rule)


def test_the_phase_goes_to_its_rate_whatever_other_schedules_do() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    per_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rule = SwaConfig(start=2, every=1, lr=0.05, anneal=2)
    swa = Swa(model, rule, [optimizer], 6, None)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        per_step.step()
        swa.update()
        optimizer.param_groups[0]["lr"] *= 3  # a schedule of epochs
        if len(rates) < 2:
            optimizer.param_groups[0]["lr"] /= 3
        swa.hold_rate()
    assert rates == pytest.approx([1.0, 0.5, 0.25, (0.25 + 0.05) / 2, 0.05, 0.05])


def test_a_phase_goes_on_with_its_rate() -> None:
    rule: dict[str, Any] = {"start": 2, "every": 1, "lr": 0.01, "anneal": 4}

    def run(stop_at: int | None) -> list[float]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        swa, rates = Swa(model, SwaConfig(**rule), [optimizer], 10, None), []
        for step in range(10):
            if step == stop_at:
                saved = Snapshot().take({"o": optimizer.state_dict(), "s": swa.state_dict()})
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer.load_state_dict(saved["o"])
                swa = Swa(model, SwaConfig(**rule), [optimizer], 10, None)
                swa.load_state_dict(saved["s"])
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            swa.update()
            swa.hold_rate()
        return rates

    untouched = run(None)
    assert untouched[-1] == 0.01
    for stop_at in (1, 2, 3, 5, 9):
        assert run(stop_at) == untouched


def test_annealing_to_no_rate_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"swa.anneal.*set swa.lr"):
        load_config({"steps": 9, "global_batch": 8, "swa": {"anneal": 3}})


def test_the_last_update_follows_before_the_weights_are_swapped() -> None:
    model = Tied()
    pending = [1]

    def settle() -> None:
        while pending:
            ema.update()
            pending.pop()

    ema = Ema(model, EmaConfig(decay=0.5, warmup=False), None, ALONE, settle=settle)
    move(model, 1)
    with ema.swapped():
        assert ema.updates == 1
        with pytest.raises(StepError, match=r"settle=run\.sync_update"):
            ema.update()


def test_statistics_may_stay_the_models_own() -> None:
    model = Tied()
    ema = Ema(model, EmaConfig(decay=0.5, warmup=False, buffers="copy"), None, ALONE)
    move(model, 1)
    model(torch.randn(8, 3))
    ema.update()
    own = model.state_dict()["norm.running_mean"].clone()
    assert own.any()
    assert torch.equal(ema.weights()["norm.running_mean"], own)
    assert not torch.equal(ema.weights()["first.weight"], model.first.weight)
