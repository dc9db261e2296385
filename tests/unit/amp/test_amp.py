"""The AMP trainers in one process: precision, loss scale, accumulation, clipping, checkpoints."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor, nn

from samestep.amp import AMPConfig, AMPTrainer, DistributedAMPTrainer, detect_bf16_support, get_optimal_dtype
from samestep.errors import CheckpointError, SamestepError, StepError, TaskError, UserError
from tests.amp_training import (
    LANES,
    OVERFLOWING,
    UNEVEN,
    Batch,
    config_of,
    digest,
    lanes_of,
    make_trainer,
    mean_loss,
    net,
    run_lanes,
    tensors_of,
)


def a_batch(seed: int = 0) -> Batch:
    (batch, *_) = lanes_of(1, first=seed)[0]
    assert batch is not None
    return batch


def overflowing() -> Batch:
    x, y = a_batch()
    y[0, 0] = OVERFLOWING
    return x, y


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these look at tensors on a CPU; tests/gpu has others"
)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left.keys() | right.keys())


# -- AMPConfig -----------------------------------------------------------------------------


def test_a_config_is_a_frozen_dataclass_with_defaults() -> None:
    config = AMPConfig()
    assert dataclasses.is_dataclass(config)
    assert config == AMPConfig.auto()
    assert dataclasses.replace(config, seed=3).seed == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_the_precision_is_what_was_asked_for_on_a_cpu_too(precision: str, dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []
    model = net()
    model.first.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    with AMPTrainer(model, config_of(precision), loss_fn=mean_loss) as trainer:
        assert trainer.precision_dtype is dtype
        assert trainer.is_using_bf16 is (precision == "bf16")
        trainer.training_step(a_batch())
        assert (trainer.scale == 1.0) is (precision != "fp16")
    assert set(seen) == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def fake_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True,
        "get_device_capability": capability, "get_device_name": "Tesla T4",
        "is_bf16_supported": capability >= (8, 0),
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, answer=answer, **k: answer)


def test_bf16_that_the_gpu_has_not_is_a_runtime_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (7, 5))
    with pytest.raises(RuntimeError, match=r"bf16.*7\.5") as caught:
        AMPConfig.force_bf16()
    assert isinstance(caught.value, SamestepError)


def test_bf16_is_taken_where_the_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, (8, 0))
    assert AMPConfig.force_bf16() != AMPConfig.force_fp16()
    assert detect_bf16_support()[0]
    assert get_optimal_dtype() is torch.bfloat16


def test_what_a_machine_computes_in_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    supported, reason = detect_bf16_support()
    assert not supported
    assert "CUDA" in reason
    assert get_optimal_dtype() is torch.float32
    fake_gpu(monkeypatch, (7, 5))
    supported, reason = detect_bf16_support()
    assert not supported
    assert "Tesla T4" in reason
    assert get_optimal_dtype() is torch.float16


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial_scale": 0.0},
        {"initial_scale": 2.0**40},
        {"growth_interval": 0},
        {"gradient_clip_max_norm": -1.0},
        {"gradient_clip_strategy": "sometimes"},
        {"same": "samples"},
    ],
)
def test_a_config_refuses_what_means_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        AMPConfig.force_fp16(**wrong)


# -- AMPTrainer ----------------------------------------------------------------------------


def test_a_step_gives_the_batchs_mean_loss_unscaled() -> None:
    model = nn.Linear(6, 2)
    x, y = a_batch()
    expected = mean_loss(model(x), y).item()
    for precision, within in (("fp32", 1e-6), ("fp16", 1e-2)):
        with AMPTrainer(model, config_of(precision), learning_rate=0.0, loss_fn=mean_loss) as one:
            loss = one.training_step((x, y))
        assert isinstance(loss, float)
        assert loss == pytest.approx(expected, rel=within)


def test_the_config_goes_by_either_name() -> None:
    config = AMPConfig.force_fp16()
    with AMPTrainer(model=net(), amp_config=config, loss_fn=mean_loss) as trainer:
        assert trainer.precision_dtype is torch.float16
    with pytest.raises(UserError, match="amp_config"):
        AMPTrainer(net(), config, amp_config=config)
    with pytest.raises(UserError, match="config"):
        AMPTrainer(net())


def test_an_optimizer_is_made_where_none_is_given() -> None:
    model = net()
    before = tensors_of(model)
    with AMPTrainer(model, AMPConfig.auto(), learning_rate=3e-4, loss_fn=mean_loss) as trainer:
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {3e-4}
        trainer.training_step(a_batch())
    assert not same(before, tensors_of(model))


def test_without_a_loss_function_the_model_gives_the_loss() -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return mean_loss(self.linear(x), y)

    x, y = a_batch()
    model = Regression()
    expected = model(x, y).item()
    for batch in ((x, y), {"x": x, "y": y}):
        with AMPTrainer(model, AMPConfig.auto(), learning_rate=0.0) as trainer:
            assert trainer.training_step(batch) == pytest.approx(expected)


@pytest.mark.requirement("002-C-9")
def test_fp32_is_plain_torch() -> None:
    """Uneven micro-batches weigh by their samples: as if they had come as one batch."""
    ours, theirs = nn.Linear(6, 2), nn.Linear(6, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    with AMPTrainer(
        ours, AMPConfig.auto(), optimizer=torch.optim.SGD(ours.parameters(), lr=0.1),
        accumulation_steps=LANES, loss_fn=mean_loss,
    ) as trainer:  # fmt: skip
        for lanes in lanes_of(5, UNEVEN):
            run_lanes(trainer, [lanes])
            whole = [torch.cat(parts) for parts in zip(*filter(None, lanes), strict=True)]
            optimizer.zero_grad()
            mean_loss(theirs(whole[0]), whole[1]).backward()
            optimizer.step()
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_a_loss_may_come_as_a_sum_and_a_count() -> None:
    """As for tokens: the mean over all of them is not the mean of the batches' means."""
    model = nn.Linear(6, 2)
    batches = [
        (x, y, torch.arange(len(x)) < tokens)
        for (x, y), tokens in zip(filter(None, lanes_of(1, (4, 8))[0]), (3, 7), strict=True)
    ]

    def squares(x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        return (model(x) - y)[real].square()

    def loss(out: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        y, real = target
        return (out - y)[real].square().sum(), 2 * real.sum()

    (expected,) = torch.autograd.grad(torch.cat([squares(*b) for b in batches]).mean(), model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with AMPTrainer(model, AMPConfig.auto(), loss_fn=loss, optimizer=optimizer, accumulation_steps=2) as trainer:
        for x, y, real in batches:
            said = trainer.training_step((x, (y, real)))
            assert said == pytest.approx(squares(x, y, real).mean().item())
    assert model.bias.grad is not None
    torch.testing.assert_close(model.bias.grad, expected)


def draws() -> tuple[float, ...]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_what_the_caller_does_between_batches_is_its_own() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draws() for _ in range(3)]
    with make_trainer("bf16") as trainer:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        found = []
        for batch in lanes_of(1)[0][:3]:
            found.append(draws())
            trainer.training_step(batch)
            assert not torch.is_autocast_enabled("cpu")
    assert found == expected


def test_a_schedule_does_not_move_on_with_a_skipped_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with AMPTrainer(
        model, AMPConfig.force_fp16(initial_scale=1024.0), loss_fn=mean_loss, optimizer=optimizer, scheduler=schedule
    ) as trainer:
        rates = []
        for batch in (a_batch(1), overflowing(), a_batch(2)):
            trainer.training_step(batch)
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("batch", "wrong"),
    [
        ("text", "no tensor"),
        ({"x": torch.zeros(4, 6)}, "loss_fn"),
        ((torch.zeros(4, 6), torch.zeros(4, 2), "each"), "no dimensions"),
    ],
)
def test_a_batch_or_loss_of_another_form_is_refused(batch: Any, wrong: str) -> None:
    def loss(out: Tensor, target: Any) -> Tensor:
        return (out - 1.0).square() if target == "each" else out.mean()

    class Two(nn.Linear):
        def forward(self, x: Tensor, *_: Any) -> Tensor:
            return super().forward(x)

    with AMPTrainer(Two(6, 2), AMPConfig.auto(), loss_fn=loss) as trainer, pytest.raises(TaskError, match=wrong):
        trainer.training_step(batch)


def test_a_trainer_whose_step_failed_does_not_go_on() -> None:
    with make_trainer("fp32") as trainer:
        with pytest.raises(RuntimeError, match="mat1"):
            trainer.training_step((torch.zeros(4, 7), torch.zeros(4, 2)))
        with pytest.raises(StepError, match="failed in step 0"):
            trainer.training_step(a_batch())


def test_a_rank_by_itself_is_told_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with AMPTrainer(net(), AMPConfig.auto(), loss_fn=mean_loss, log_dir=tmp_path) as trainer:
        trainer.training_step(a_batch())
    assert "rank 1 of 2" in capfd.readouterr().err
    assert "Precision fp32" in (tmp_path / "rank-0.log").read_text()


def test_a_lane_without_samples_adds_nothing() -> None:
    with make_trainer("fp32") as trainer:
        (losses,) = run_lanes(trainer, lanes_of(1, (5, 0, 7, 3)))
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False]


@pytest.mark.requirement("003-DEP-1")
def test_the_scale_grows_after_steps_without_overflow() -> None:
    config = AMPConfig.force_fp16(initial_scale=1024.0, growth_interval=2)
    with AMPTrainer(net(), config, loss_fn=mean_loss) as trainer:
        scales = []
        for seed in range(4):
            trainer.training_step(a_batch(seed))
            scales.append(trainer.scale)
    assert scales == [1024.0, 2048.0, 2048.0, 4096.0]


def test_the_first_scale_is_of_the_mean_loss_whatever_the_batch() -> None:
    """A gradient of the mean near 1 fits fp16 at this scale; that of the sum does not."""
    config = AMPConfig.force_fp16(initial_scale=4096.0)
    with AMPTrainer(nn.Linear(6, 2), config, loss_fn=mean_loss) as trainer:
        trainer.training_step((torch.ones(1024, 6), torch.ones(1024, 2)))
        assert trainer.get_gradient_summary()["skipped_steps"] == 0


def test_an_overflow_skips_the_step_and_shrinks_the_scale() -> None:
    with AMPTrainer(net(), AMPConfig.force_fp16(initial_scale=1024.0), loss_fn=mean_loss) as trainer:
        trainer.training_step(a_batch(1))
        before = digest(trainer)
        assert math.isfinite(trainer.training_step(overflowing()))
        assert trainer.scale == 512.0
        assert digest(trainer) == before, "weights, buffers and optimizer stay as they were"
        trainer.training_step(a_batch(2))
        assert digest(trainer) != before
        summary = trainer.get_gradient_summary()
        assert (summary["steps"], summary["skipped_steps"], summary["scale"]) == (3, 1, 512.0)


def test_the_scale_stays_within_an_accumulation() -> None:
    with make_trainer("fp16", initial_scale=1024.0) as trainer:
        scales = []
        for batch in lanes_of(1, overflow=(0, 1))[0]:
            trainer.training_step(batch)
            scales.append(trainer.scale)
    assert scales == [1024.0, 1024.0, 1024.0, 512.0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_are_clipped_after_they_are_unscaled(precision: str) -> None:
    model = nn.Linear(6, 2)
    x, y = a_batch()
    config = config_of(precision, initial_scale=256.0, gradient_clip_max_norm=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [param.detach().clone() for param in model.parameters()]
    mean_loss(model(x), y).backward()
    whole = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    with AMPTrainer(model, config, optimizer=optimizer, loss_fn=mean_loss) as trainer:
        assert trainer.last_clipping_stats is None
        trainer.training_step((x, y))
        stats = trainer.last_clipping_stats
        assert stats["norm"] == pytest.approx(whole, rel=1e-2)
        assert stats["clipped"] is True
        assert trainer.get_gradient_summary()["norm"] == stats["norm"]
    moved = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
    assert float(nn.utils.get_total_norm(moved)) == pytest.approx(0.01, rel=1e-3)


def test_gradients_are_clipped_by_value() -> None:
    model = nn.Linear(6, 2)
    before = model.weight.detach().clone()
    config = AMPConfig.auto(gradient_clip_max_norm=1e-3, gradient_clip_strategy="value")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with AMPTrainer(model, config, optimizer=optimizer, loss_fn=mean_loss) as trainer:
        trainer.training_step(a_batch())
    assert (model.weight - before).abs().max().item() == pytest.approx(1e-3, rel=1e-3)


def test_draws_follow_from_the_configs_seed_alone() -> None:
    found = []
    for seed, callers in ((1, 5), (1, 6), (2, 5)):
        with make_trainer("fp32", seed=seed) as trainer:
            torch.manual_seed(callers)
            run_lanes(trainer, lanes_of(2))
            found.append(digest(trainer))
    assert found[0] == found[1] != found[2]


# -- checkpoints ---------------------------------------------------------------------------


def test_a_training_goes_on_from_its_checkpoint_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.pt"
    with make_trainer("fp16", growth_interval=2) as trainer:
        run_lanes(trainer, lanes_of(3, overflow=(1, 2)))
        trainer.save_checkpoint(str(path), metadata={"epoch": 4, "note": "good"})
        at_save = trainer.scale
        run_lanes(trainer, lanes_of(3, first=3))
        expected = digest(trainer), trainer.scale
    with make_trainer("fp16", model=net(seed=9), growth_interval=2) as other:
        assert other.load_checkpoint(str(path)) == {"epoch": 4, "note": "good"}
        assert other.scale == at_save
        run_lanes(other, lanes_of(3, first=3))
        assert (digest(other), other.scale) == expected
    assert [file.name for file in path.parent.iterdir()] == ["state.pt"]


def test_a_checkpoint_is_read_by_torch_alone_and_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with make_trainer("fp16") as trainer:
        run_lanes(trainer, lanes_of(1))
        trainer.save_checkpoint(path)
        state = torch.load(path, weights_only=True)
        plain = net(seed=3)
        plain.load_state_dict(state["model_state_dict"])
        assert same(tensors_of(plain), tensors_of(trainer.model))
        assert "optimizer_state_dict" in state


def test_an_optimizer_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with make_trainer("fp32") as trainer:
        run_lanes(trainer, lanes_of(2))
        trainer.save_checkpoint(path, include_optimizer=False)
        weights = tensors_of(trainer.model)
    assert "optimizer_state_dict" not in torch.load(path, weights_only=True)
    with make_trainer("fp32", model=net(seed=9)) as other:
        other.load_checkpoint(path)
        assert same(tensors_of(other.model), weights)
        assert not other.optimizer.state_dict()["state"]


def test_no_checkpoint_is_written_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    with make_trainer("fp32") as trainer:
        trainer.training_step(lanes_of(1)[0][0])
        with pytest.raises(UserError, match=r"1 of 4"):
            trainer.save_checkpoint(tmp_path / "state.pt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["gone", "cut", "another model", "another optimizer", "code"])
def test_a_checkpoint_that_cannot_be_used_changes_nothing(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    with make_trainer("fp32") as trainer:
        trainer.save_checkpoint(path)
        before = digest(trainer)
        if damage == "gone":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            state = torch.load(path, weights_only=True)
            if damage == "another model":
                state["model_state_dict"]["last.bias"] = torch.zeros(5)
            elif damage == "another optimizer":
                state["model_state_dict"]["last.bias"] += 1
                state["optimizer_state_dict"]["param_groups"] *= 2
            else:
                state["metadata"] = Path("/")  # what is no plain data is read by running code
            torch.save(state, path)
        with pytest.raises(CheckpointError, match=r"state\.pt"):
            trainer.load_checkpoint(path)
        assert digest(trainer) == before


# -- DistributedAMPTrainer without others --------------------------------------------------


@pytest.mark.requirement("003-T1-1", "003-T1-13")
def test_a_world_of_one_is_the_plain_trainer() -> None:
    found = []
    for kind in (AMPTrainer, DistributedAMPTrainer):
        model = net()
        with kind(
            model, AMPConfig.force_fp16(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
            accumulation_steps=LANES, loss_fn=mean_loss,
        ) as trainer:  # fmt: skip
            assert isinstance(trainer, AMPTrainer)
            run_lanes(trainer, lanes_of(3))
            found.append(digest(trainer))
            assert not DistributedAMPTrainer.is_distributed()
    assert found[0] == found[1]


def test_batches_that_come_one_by_one_are_not_for_graphs() -> None:
    assert AMPConfig().for_run(lanes=2).speed.graph is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU for nccl")
def test_nccl_without_a_gpu_says_what_to_do() -> None:
    trainer = DistributedAMPTrainer(net(), AMPConfig.auto(), rank=0, world_size=2)
    with pytest.raises(SamestepError, match=r"nccl.*gloo"):
        trainer.setup_distributed()
    trainer.close()
    assert not DistributedAMPTrainer.is_distributed()


@pytest.mark.requirement("003-T1-6")
@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_of_its_world_is_refused(rank: int, world: int) -> None:
    with pytest.raises(UserError, match=r"rank|world_size"):
        DistributedAMPTrainer(net(), AMPConfig.auto(), rank=rank, world_size=world, backend="gloo")


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match=r"device_ids is \[0, 1\]"):
        DistributedAMPTrainer(net(), AMPConfig.auto(), device_ids=[0, 1])
    trainer = DistributedAMPTrainer(net(), AMPConfig.auto(), device_ids=[0])
    with pytest.raises(UserError, match="GPU 0 but torch sees 0"):
        trainer.setup_distributed()


def test_another_model_is_not_wrapped() -> None:
    with DistributedAMPTrainer(net(), AMPConfig.auto()) as trainer, pytest.raises(UserError, match="another model"):
        trainer.wrap_model(net())


def test_closing_twice_is_closing_once() -> None:
    trainer = DistributedAMPTrainer(net(), AMPConfig.auto(), loss_fn=mean_loss)
    trainer.setup_distributed()
    trainer.setup_distributed()
    trainer.training_step(a_batch())
    trainer.close()
    trainer.close()
