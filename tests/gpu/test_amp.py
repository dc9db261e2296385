"""The AMP trainers on a GPU, with one rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import nn

from samestep.amp import AMPConfig, AMPTrainer, DistributedAMPTrainer
from tests.amp_training import LANES, UNEVEN, digest, lanes_of, mean_loss, net, run_lanes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def trainer_of(precision: str, model: nn.Module | None = None, fused: bool = True) -> AMPTrainer:
    model = net() if model is None else model
    return DistributedAMPTrainer(
        model,
        AMPConfig(precision=precision, initial_scale=1024.0, gradient_clip_max_norm=1.0),
        device_ids=[0],
        accumulation_steps=LANES,
        loss_fn=mean_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused),
    )


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_it_learns_in_half_precision(precision: str, dtype: torch.dtype) -> None:
    seen: set[tuple[torch.dtype, str]] = set()
    model = net()
    model.first.register_forward_hook(lambda module, given, out: seen.add((out.dtype, out.device.type)))
    with trainer_of(precision, model) as trainer:
        steps = lanes_of(1, UNEVEN) * 40
        losses = run_lanes(trainer, steps)
        assert trainer.precision_dtype is dtype
        assert not torch.is_autocast_enabled("cuda")
        assert trainer.last_clipping_stats is not None
        assert trainer.get_gradient_summary()["skipped_steps"] == 0
    assert seen == {(dtype, "cuda")}
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert sum(losses[-1]) < 0.5 * sum(losses[0])


def test_auto_is_what_the_gpu_is_best_at() -> None:
    best = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    with AMPTrainer(net(), AMPConfig.auto(), loss_fn=mean_loss) as trainer:
        assert trainer.precision_dtype is best


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "asked at once"])
def test_an_overflow_on_a_gpu_skips_the_step(fused: bool) -> None:
    with trainer_of("fp16", fused=fused) as trainer:
        run_lanes(trainer, lanes_of(1))
        before = digest(trainer)
        (losses,) = run_lanes(trainer, lanes_of(1, first=1, overflow=(1, 2)))
        assert all(map(math.isfinite, losses))
        assert digest(trainer) == before
        assert trainer.scale == 512.0
        run_lanes(trainer, lanes_of(1, first=2))
        assert digest(trainer) != before
        assert trainer.get_gradient_summary()["skipped_steps"] == 1


def test_a_lane_without_samples_on_a_gpu() -> None:
    with trainer_of("fp16") as trainer:
        (losses,) = run_lanes(trainer, lanes_of(1, (5, 0, 7, 0)))
    assert [math.isnan(loss) for loss in losses] == [False, True, False, True]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_training_on_a_gpu_goes_on_to_the_bit(precision: str, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with trainer_of(precision) as trainer:
        run_lanes(trainer, lanes_of(3, UNEVEN))
        trainer.save_checkpoint(path)
        run_lanes(trainer, lanes_of(3, UNEVEN, first=3))
        expected = digest(trainer), trainer.scale
    with trainer_of(precision, net(seed=9)) as other:
        other.load_checkpoint(path)
        run_lanes(other, lanes_of(3, UNEVEN, first=3))
        assert (digest(other), other.scale) == expected


def test_the_callers_draws_on_a_gpu_are_its_own() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3, device="cuda")[2]
    with trainer_of("bf16") as trainer:
        torch.manual_seed(1)
        torch.rand(2, device="cuda")
        state = torch.cuda.get_rng_state()
        trainer.training_step(lanes_of(1)[0][0])
        assert torch.equal(torch.cuda.get_rng_state(), state)
        torch.manual_seed(1)
        assert torch.equal(torch.rand(3, device="cuda")[2], expected)
