"""The small rooms of a run that survives: losses that are no numbers, ranks that differ, times."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor, nn
from torch.optim import SGD, Adam

from samestep.checkpoint.format import read_model
from samestep.checkpoint.listing import list_checkpoints
from samestep.config import Config, load_config
from samestep.config.optim import ClipConfig
from samestep.config.schema import BestConfig
from samestep.data.batch import LaneBatch, Position
from samestep.distributed.context import SingleProcessContext
from samestep.distributed.health.activity import (
    BETWEEN_STEPS,
    COMPUTE,
    DATA,
    EVALUATE,
    EXCHANGE,
    READING,
    SAVE,
    Activity,
)
from samestep.errors import NonFiniteLoss, RanksDiffer, RunDirError, StepError
from samestep.optim.clipping import Clipping
from samestep.optim.loss_scale import CheckedScaling
from samestep.optim.nonfinite import FiniteGuard
from samestep.optim.update import Update
from samestep.reduce.stats import LaneStats, LocalStats, RankFlags
from samestep.train.loop import BestSoFar
from samestep.train.rank_check import (
    _checksums,
    _differences,
    _named_tensors,
    refuse_different_ranks,
)
from samestep.train.saver import Saver
from samestep.train.step_times import StepTimes, peak_memory
from samestep.train.time_report import read_times
from tests.unit.clock import Clock

T = TypeVar("T")
NAN, INFINITE = float("nan"), float("inf")


class Two(SingleProcessContext):
    """A context whose gather also hears one more rank."""

    other: Any = None

    @property
    def world(self) -> int:
        return 2

    def gather(self, value: T) -> list[T]:
        return [value, self.other]


@pytest.fixture
def two() -> Iterator[Two]:
    found = Two()
    yield found
    found.close()


@pytest.fixture
def context() -> Iterator[SingleProcessContext]:
    found = SingleProcessContext()
    yield found
    found.close()


# -- losses that are no numbers -------------------------------------------------------------------


def stats(*losses: float) -> LocalStats:
    return LocalStats([LaneStats(torch.tensor(loss), 4.0) for loss in losses], RankFlags())


def guard_for(
    context: SingleProcessContext, policy: str = "skip", model: nn.Module | None = None
) -> FiniteGuard:
    skips, model = policy == "skip", model or nn.Linear(1, 1)
    return FiniteGuard(context, [model], remembered=3, skips=skips, least_scale=None)


def allows_update(
    guard: FiniteGuard, step: int, measured: LocalStats, params: Sequence[nn.Parameter]
) -> bool:
    """Whether an update changes these parameters; it looks at their gradients and the losses."""
    params = params or [nn.Parameter(torch.ones(1))]
    check = CheckedScaling(torch.device("cpu"))
    check.apply([param.grad for param in params], 1.0)
    clipping = Clipping(ClipConfig(), [params], torch.device("cpu"))
    optimizer = SGD(params, lr=0.1)
    update = Update([optimizer], [], [], clipping, check, guard, torch.device("cpu"))
    return not bool(update.apply(step, measured, ()).skipped)


def batch(lane: int, ids: Sequence[Any]) -> LaneBatch:
    return LaneBatch(lane, None, tuple(ids))


def normal_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def mean_of(model: nn.Sequential) -> Tensor:
    return dict(model.named_buffers())["1.running_mean"]


def test_a_skipped_step_leaves_the_statistics_as_they_were(context: SingleProcessContext) -> None:
    model = normal_model()
    guard = guard_for(context, model=model)
    model(torch.randn(8, 3))
    before = {name: value.clone() for name, value in model.named_buffers()}
    guard.begin(0)
    model(torch.full((8, 3), NAN))
    assert mean_of(model).isnan().all()
    assert not allows_update(guard, 0, stats(NAN, 1.0), [])
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert after["1.num_batches_tracked"] == 1


def test_an_allowed_step_keeps_its_new_statistics(context: SingleProcessContext) -> None:
    model = normal_model()
    guard = guard_for(context, model=model)
    guard.begin(0)
    model(torch.randn(8, 3) + 5)
    moved = mean_of(model).clone()
    assert allows_update(guard, 0, stats(1.0, 2.0), list(model.parameters()))
    assert torch.equal(mean_of(model), moved)
    # And the next skipped step goes back to these, not to the first ones.
    guard.begin(1)
    model(torch.full((8, 3), NAN))
    assert not allows_update(guard, 1, stats(NAN), [])
    assert torch.equal(mean_of(model), moved)


@pytest.mark.parametrize("bad", [NAN, INFINITE, -INFINITE])
def test_a_gradient_that_is_no_number_skips_the_step_too(
    context: SingleProcessContext, bad: float, capfd: pytest.CaptureFixture[str]
) -> None:
    guard = guard_for(context)
    good, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    good.grad, other.grad = torch.ones(2), torch.tensor([1.0, bad, 1.0])
    guard.begin(4)
    assert not allows_update(guard, 4, stats(1.0), [good, other])
    assert "a gradient of step 4 is NaN or infinite: the step is skipped" in capfd.readouterr().err
    other.grad = torch.tensor([3e38, 3e38, -1.0])  # large, and a sum in float32 would overflow
    assert allows_update(guard, 5, stats(1.0), [good, other])


def test_infinities_of_both_signs_do_not_cancel(context: SingleProcessContext) -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([INFINITE, -INFINITE])
    assert not allows_update(guard_for(context), 0, stats(1.0), [param])


def test_ten_skipped_steps_in_a_row_end_the_run(context: SingleProcessContext) -> None:
    guard = guard_for(context)
    for step in range(9):
        guard.begin(step)
        assert not allows_update(guard, step, stats(NAN), [])
    guard.begin(9)
    assert allows_update(guard, 9, stats(1.0), [])  # so that they were not in a row
    for step in range(10, 19):
        guard.begin(step)
        assert not allows_update(guard, step, stats(NAN), [])
    guard.begin(19)
    with pytest.raises(NonFiniteLoss, match=r"step 19 .*; 10 steps in a row were skipped$"):
        allows_update(guard, 19, stats(NAN), [])


def test_the_samples_of_a_bad_lane_are_named(context: SingleProcessContext) -> None:
    guard = guard_for(context, "stop")
    guard.begin(7)
    for lane, ids in enumerate([(3, 1), range(20), (5,), (0,)]):
        guard.saw(7, batch(lane, ids))
    with pytest.raises(NonFiniteLoss) as caught:
        guard.stop(7, [0, 1, 3])
    many = ", ".join(map(str, range(16)))
    assert str(caught.value) == (
        f"the loss of step 7 is NaN or infinite in lane 0 (samples 3, 1), lane 1 (samples {many}, "
        "...), lane 3 (samples 0). The checkpoints before it are whole. Look at these samples and "
        "at the learning rate; on_nonfinite: skip passes over such steps"
    )


def test_the_samples_of_another_ranks_lane_are_named_too(two: Two) -> None:
    two.other = {2: (8, 9)}
    guard = guard_for(two, "stop")
    guard.begin(0)
    guard.saw(0, batch(1, [4]))
    with pytest.raises(NonFiniteLoss, match=r"lane 1 \(samples 4\), lane 2 \(samples 8, 9\)"):
        guard.stop(0, [1, 2])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (("", "", ""), "3 samples of a stream"),
        (("a1", "b2"), "samples a1, b2"),
        ((0, 1), "samples 0, 1"),
        ((0,), "samples 0"),
        pytest.param(
            ("",),
            "1 sample",
        ),
    ],
)
def test_samples_of_a_stream_are_counted(
    context: SingleProcessContext, ids: tuple[Any, ...], words: str
) -> None:
    guard = guard_for(context, "stop")
    guard.begin(0)
    guard.saw(0, batch(0, ids))
    with pytest.raises(NonFiniteLoss) as caught:
        guard.stop(0, [0])
    assert f"lane 0 ({words}" in str(caught.value)


def test_samples_are_remembered_as_long_as_losses_are_unread(context: SingleProcessContext) -> None:
    guard = guard_for(context, "stop")  # remembers three steps
    for step in range(5):
        guard.begin(step)
        guard.saw(step, batch(0, [step]))
    for step in (2, 3, 4):
        with pytest.raises(NonFiniteLoss, match=rf"lane 0 \(samples {step}\)"):
            guard.stop(step, [0])
    assert len(guard._seen) == 3


# -- ranks that differ ----------------------------------------------------------------------------


def checksum(tensor: Tensor) -> int:
    return _checksums([tensor])[0]


def swapped(tensor: Tensor) -> Tensor:
    other = tensor.clone()
    other[0], other[-1] = tensor[-1].clone(), tensor[0].clone()
    return other


def moved(tensor: Tensor) -> Tensor:
    return tensor.roll(1)


def flipped_at(place: int, bit: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        other = tensor.clone()
        other.view(torch.uint8)[place] ^= 1 << bit
        return other

    return change


def balanced(tensor: Tensor) -> Tensor:
    """One byte up and another one down: the plain sum of the bytes stays."""
    other = tensor.clone().view(torch.uint8)
    other[0] = 10
    other[9] = 20
    return other.view(tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_checksum_sees_bits_and_places(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.arange(1, 65).to(dtype)
    size = tensor.element_size()
    sums = [checksum(tensor), checksum(swapped(tensor)), checksum(moved(tensor))]
    sums += [
        checksum(flipped_at(place, bit)(tensor))
        for place in range(0, 64 * size, 7)
        for bit in range(8)
    ]
    assert len(set(sums)) == len(sums)
    base = balanced(tensor)
    other = base.clone()
    other.view(torch.uint8)[0] += 1
    other.view(torch.uint8)[9] -= 1
    assert checksum(base) != checksum(other)


def test_a_checksum_is_the_same_for_the_same_values() -> None:
    tensor = torch.randn(6, 5)
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))  # 0.0 and -0.0 are not one


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0), torch.tensor(3.0), torch.tensor(True), torch.ones(2, dtype=torch.complex64),
        torch.ones(2, 2, dtype=torch.bool), torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=str,
)  # fmt: skip
def test_tensors_of_every_kind_have_a_checksum(tensor: Tensor) -> None:
    assert isinstance(checksum(tensor), int)


def test_large_tensors_are_gone_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.train.rank_check._AT_ONCE", 8)
    tensor = torch.arange(1.0, 9.0)
    parts = tensor.view(-1, 2)
    reordered = parts.flip(0).reshape(-1)
    doubled = tensor.clone()
    doubled[2:4] = tensor[:2]
    sums = {checksum(t) for t in (tensor, reordered, doubled, swapped(tensor), moved(tensor))}
    assert len(sums) == 5


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        ([{"a": 1}, {"a": 1}], []),
        (
            [{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1}],
            ["a on rank(s) 1 is not what it is on rank(s) 0, 2"],
        ),
        (
            [{"b": 1, "a": 5}, {"b": 1, "a": 6}, {"b": 2, "a": 6}, {"b": 3, "a": 6}],
            [
                "a on rank(s) 0 is not what it is on rank(s) 1, 2, 3",
                "b on rank(s) 2, 3 is not what it is on rank(s) 0, 1",
            ],
        ),
        ([{"a": 1}, {}], ["a on rank(s) 1 is not what it is on rank(s) 0"]),
    ],
)
def test_what_differs_is_named_with_the_ranks_of_the_fewest(
    told: list[dict[str, int]], lines: list[str]
) -> None:
    assert _differences(told) == lines


def test_weights_buffers_and_states_have_names() -> None:
    model, other = normal_model(), nn.Linear(3, 1)
    optimizer = Adam([*model.parameters(), *other.parameters()])
    other(model(torch.randn(4, 3))).sum().backward()
    optimizer.step()
    names = _named_tensors([model, other], [optimizer], skip_buffers=False)
    assert {
        "model.0.weight", "model.1.running_mean", "module 1.bias", "optimizer 0.model.0.weight.exp_avg",
        "optimizer 0.module 1.weight.exp_avg_sq",
    } <= names.keys()  # fmt: skip
    without = _named_tensors([model, other], [optimizer], skip_buffers=True)
    assert {name for name in names.keys() - without.keys()} == {
        "model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"
    }  # fmt: skip


def test_states_of_two_modules_with_the_same_names_are_all_compared() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)
    other(model(torch.randn(4, 2))).sum().backward()
    optimizer.step()
    names = _named_tensors([model, other], [optimizer], skip_buffers=False)
    assert sum("momentum_buffer" in name for name in names) == 4


def test_ranks_that_are_the_same_pass_and_others_are_told(two: Two) -> None:
    model = nn.Linear(2, 2)
    mine = dict(
        zip(("model.weight", "model.bias"), _checksums([model.weight, model.bias]), strict=True)
    )
    two.other = mine
    refuse_different_ranks(two, 5, [model], [], skip_buffers=False)
    two.other = {**mine, "model.bias": 0}
    with pytest.raises(RanksDiffer) as caught:
        refuse_different_ranks(two, 5, [model], [], skip_buffers=False)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "the ranks are not the same after step 5:",
        "  model.bias on rank(s) 1 is not what it is on rank(s) 0",
    ]
    assert caught.value.exit_code == 4


def test_of_many_differences_the_first_ones_are_shown(two: Two) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    two.other = {}
    with pytest.raises(RanksDiffer, match=r"\n  \.\.\. and 3 more\n") as caught:
        refuse_different_ranks(two, 5, [model], [], skip_buffers=False)
    assert str(caught.value).count(" is not what it is on ") == 5


# -- times ----------------------------------------------------------------------------------------


def spend(activity: Activity, clock: Clock, **seconds: float) -> None:
    phases = {
        "data": DATA, "compute": COMPUTE, "exchange": EXCHANGE, "save": SAVE, "reading": READING,
        "evaluate": EVALUATE, "between": BETWEEN_STEPS,
    }  # fmt: skip
    for name, spent in seconds.items():
        activity.enter(phases[name])
        clock.now += spent


def test_a_row_splits_the_time_of_its_steps(clock: Clock) -> None:
    activity = Activity()
    activity.begin_step(0)
    spend(activity, clock, data=50, compute=50)  # before it is looked at
    activity.end_step()
    times = StepTimes(activity, torch.device("cpu"))
    activity.begin_step(8)
    spend(
        activity, clock, data=1, compute=4, exchange=2, reading=3, save=5, evaluate=100, between=7
    )
    row = times.row(steps=2, seconds=0.5, samples=64)
    memory = row.pop("peak_memory_mb")
    assert row == {
        "samples_per_second": 128.0,
        "time_data": 1.0,  # in one of the two steps, the one that was timed
        "time_compute": 4.0 + 3.0 / 2,
        "time_exchange": 2.0,
        "time_save": 5.0 / 2,  # timed whenever it happens
    }
    assert memory > 10
    # The next row starts over.
    activity.begin_step(16)
    spend(activity, clock, data=8)
    clock.now += 2
    row = times.row(steps=1, seconds=1.0, samples=64)
    assert (row["time_data"], row["time_compute"], row["time_save"]) == (10.0, 0.0, 0.0)


def test_the_time_of_the_phase_that_goes_on_counts(clock: Clock) -> None:
    activity = Activity()
    times = StepTimes(activity, torch.device("cpu"))
    activity.begin_step(0)
    clock.now += 3
    assert times.row(1, 1.0, 1)["time_compute"] == 3
    assert activity.phase == COMPUTE
    clock.now += 4
    assert "time_compute" not in times.row(1, 1.0, 1), "no timed step began meanwhile"


def test_the_rank_that_others_wait_for_is_the_one_that_worked_most(clock: Clock) -> None:
    times = StepTimes(Activity(), torch.device("cpu"))
    for busy in ([1.0, 8.0, 2.0], [1.0, 0.5, 4.0], [1.0, 0.5, 2.0]):  # once was enough for rank 1
        times.hear([RankFlags(0, seconds) for seconds in busy])
    row = times.row(3, 1.0, 1)
    assert (row["slowest_rank"], row["rank_spread"]) == (1, 3.0)
    times.hear([RankFlags(0, 2.0), RankFlags(0, 1.0), RankFlags(0, 1.0)])
    assert times.row(3, 1.0, 1)["slowest_rank"] == 0
    assert "slowest_rank" not in times.row(1, 1.0, 1)  # nothing was heard


@pytest.mark.parametrize(("busy", "spread"), [([0.0, 0.0], 1.0), ([0.0, 2.0], 1.0)])
def test_a_rank_that_did_nothing_does_not_divide_by_zero(
    clock: Clock, busy: list[float], spread: float
) -> None:
    times = StepTimes(Activity(), torch.device("cpu"))
    times.hear([RankFlags(0, seconds) for seconds in busy])
    assert times.row(1, 0.0, 1)["rank_spread"] == spread


def test_one_rank_alone_is_not_compared(clock: Clock) -> None:
    times = StepTimes(Activity(), torch.device("cpu"))
    times.hear([RankFlags(0, 2.0)])
    assert "rank_spread" not in times.row(1, 1.0, 1)


def test_a_note_tells_what_was_done_since_the_last(clock: Clock) -> None:
    activity = Activity()
    times = StepTimes(activity, torch.device("cpu"))
    activity.begin_step(0)
    spend(activity, clock, data=1, compute=2, exchange=50, between=9)
    assert times.since_last_note() == 3
    assert times.since_last_note() == 0
    spend(activity, clock, compute=5, exchange=1)
    assert times.since_last_note() == 5


def test_the_peak_memory_is_in_bytes() -> None:
    assert 2**24 < peak_memory(torch.device("cpu")) < 2**40


def time_row(step: int, per_second: float, data: float, **more: Any) -> str:
    row = {"step": step, "samples_per_second": per_second, "time_data": data, **more}
    return json.dumps(row) + "\n"


def test_times_are_the_median_and_the_worst(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "loss": 1.0, "seconds": 9.0}\n'
        + time_row(0, 100.0, 0.5, slowest_rank=1, rank_spread=1.5)
        + time_row(1, 300.0, 0.125, slowest_rank=3, rank_spread=1.25)
        + time_row(2, 200.0, 0.25, slowest_rank=3, rank_spread=2.0)
        + '{"step": 3, "val_loss": 2.0}\n'
        + '[]\nnull\n{"step": 4, "samples_per_sec'
    )
    assert read_times(tmp_path) == {
        "samples_per_second": {"median": 200.0, "worst": 100.0},
        "time_data": {"median": 0.25, "worst": 0.5},
        "rank_spread": {"median": 1.5, "worst": 2.0},
        "slowest_rank": 3,
    }


def test_a_run_alone_has_no_slowest_rank(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(time_row(0, 100.0, 0.5))
    assert set(read_times(tmp_path)) == {"samples_per_second", "time_data"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file or directory. Give a run's directory"),
        ("", "holds no times yet"),
        ('{"step": 0, "loss": 1.0}\n', "holds no times yet: they come with every log_every steps"),
    ],
)
def test_a_run_without_times_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(RunDirError) as caught:
        read_times(tmp_path)
    assert f"{tmp_path / 'metrics.jsonl'} {words}" in str(caught.value)


# -- when a run is saved --------------------------------------------------------------------------


def config_in(tmp_path: Path, *overrides: str) -> Config:
    base = {"task": "task.py:Good", "epochs": 3, "global_batch": 8, "run_dir": str(tmp_path)}
    return load_config(base, overrides)


def saver_in(tmp_path: Path, context: SingleProcessContext, *overrides: str) -> Saver:
    saver = Saver(config_in(tmp_path, *overrides), context, tmp_path, None)
    model = nn.Linear(1, 1)
    saver.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    return saver


def saved_steps(tmp_path: Path) -> list[int]:
    return [item.step for item in list_checkpoints(tmp_path / "checkpoints", checksums=True)]


@pytest.mark.parametrize(
    ("overrides", "due"),
    [
        ([], {4, 8, 12}),
        (["checkpoint.every_epochs=null"], set()),
        (["checkpoint.every_epochs=2"], {8}),
        (["checkpoint.every_steps=5"], {4, 5, 8, 10, 12}),
        (["checkpoint.every_steps=6", "checkpoint.every_epochs=null"], {6, 12}),
    ],
)
def test_a_save_is_due_by_steps_and_by_epochs(
    tmp_path: Path, context: SingleProcessContext, overrides: list[str], due: set[int]
) -> None:
    saver = saver_in(tmp_path, context, *overrides)
    found = {
        steps
        for steps in range(1, 13)  # epochs of four steps
        if saver.is_due(steps, (steps - 1) // 4 + 1, ends_epoch=steps % 4 == 0)
    }
    assert found == due


def test_a_new_best_is_saved_with_its_step(tmp_path: Path, context: SingleProcessContext) -> None:
    saver = saver_in(tmp_path, context)
    saver.ask(3, {"val_loss": 0.5}, best=False)
    assert not saver.is_due(3, 1, ends_epoch=False)
    saver.ask(3, {"val_loss": 0.25, "accuracy": 0.5}, best=True)
    assert saver.is_due(3, 1, ends_epoch=False)
    saver.save(Position(3), {}, None)
    assert not saver.is_due(4, 1, ends_epoch=False)
    saver.close()
    [found] = list_checkpoints(tmp_path / "checkpoints", checksums=True)
    assert found.manifest is not None
    assert found.manifest.best is not None
    assert (found.manifest.best.step, found.manifest.best.value) == (3, 0.25)
    assert found.manifest.metrics == {"val_loss": 0.25, "accuracy": 0.5}


def test_one_step_is_saved_once(tmp_path: Path, context: SingleProcessContext) -> None:
    saver = saver_in(tmp_path, context)
    saver.save(Position(2), {}, None)
    saver.wait()
    before = (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").stat().st_mtime_ns
    saver.save(Position(2), {}, None)
    saver.close()
    after = (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").stat().st_mtime_ns
    assert before == after


def test_nothing_is_saved_where_saving_is_off(
    tmp_path: Path, context: SingleProcessContext
) -> None:
    saver = saver_in(tmp_path, context, "checkpoint.enabled=false")
    saver.save(Position(2), {}, None)
    saver.close()
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("behind", ["true", "false"])
def test_a_save_holds_what_was_there_when_it_was_asked_for(
    tmp_path: Path, context: SingleProcessContext, behind: str
) -> None:
    saver = Saver(config_in(tmp_path, f"checkpoint.asynchronous={behind}"), context, tmp_path, None)
    model = nn.Linear(1, 1)
    saver.prepare([model], [SGD(model.parameters(), lr=0.1)], [])
    for step in (1, 2):
        nn.init.constant_(model.weight, float(step))
        saver.save(Position(step), {}, None)
        nn.init.constant_(model.weight, NAN)  # the next step begins at once
        if behind == "false":
            assert saved_steps(tmp_path)[-1] == step
    saver.close()
    for item in list_checkpoints(tmp_path / "checkpoints", checksums=True):
        assert read_model(item.folder)["weight"].item() == item.step


def test_two_things_cannot_be_kept_under_one_name(
    tmp_path: Path, context: SingleProcessContext
) -> None:
    saver = saver_in(tmp_path, context)
    saver.keep("ema", nn.Linear(1, 1))
    with pytest.raises(StepError, match=r"run\.keep was called twice for 'ema'"):
        saver.keep("ema", nn.Linear(1, 1))


def test_the_clock_asks_for_a_save(
    tmp_path: Path, context: SingleProcessContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    saver = saver_in(tmp_path, context, "checkpoint.every_minutes=2")
    context.activity.begin_step(0)
    clock.now += 119
    assert not saver.wants_time()
    clock.now += 2
    assert saver.wants_time()
    assert not saver.wants_time(), "it is told once"
    saver.save(Position(1), {}, None)
    assert not saver.wants_time()
    saver.close()
    assert not saver_in(tmp_path, context, "checkpoint.every_minutes=null").wants_time()


def test_metrics_that_are_tensors_are_refused_by_name(
    tmp_path: Path, context: SingleProcessContext
) -> None:
    saver = saver_in(tmp_path, context)
    with pytest.raises(StepError, match=r"val_loss is a Tensor.*\.item\(\)"):
        saver.ask(1, {"val_loss": torch.tensor(0.5)}, best=True)


# -- the best so far ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "values", "best"),
    [
        ({}, [3.0, 2.0, 2.0, 1.0], [True, True, False, True]),
        ({"mode": "max"}, [1.0, 2.0, 2.0, 3.0], [True, True, False, True]),
        ({"min_delta": 0.5}, [3.0, 2.75, 2.25], [True, False, True]),
        pytest.param(
            {},
            [math.nan, 2.0, 3.0],
            [True, True, False],
        ),
    ],
)
def test_a_better_value_is_the_best(
    rule: dict[str, Any], values: list[float], best: list[bool]
) -> None:
    so_far = BestSoFar(BestConfig(**rule))
    assert [so_far.offer({"val_loss": value}, step) for step, value in enumerate(values)] == best
