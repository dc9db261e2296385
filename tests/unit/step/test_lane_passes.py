"""The passes of one step: what may be called when, what draws from where, what is read once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from samestep.data.batch import LaneBatch, Position
from samestep.errors import StepError, TaskError
from samestep.lanes.random_streams import BETWEEN, MODEL
from samestep.reduce.gradients import Grads, RecordedSums
from samestep.reduce.stats import NO_FLAGS, LaneStats, RankFlags
from samestep.step.lane_passes import LanePasses, LossFunction, WholeLanes
from samestep.step.loss_terms import check_loss
from tests.unit.step.engines import LR, Steps, inputs, linear, output_sum, setup_of

# -- wrong calls ----------------------------------------------------------------------------------


def loss_of(steps: Steps, batch: LaneBatch) -> Tensor:
    loss: Tensor = steps.model(batch.x).sum()
    return loss


def test_backward_outside_of_a_lane_is_refused() -> None:
    steps = Steps()
    passes = steps.first_passes()
    with pytest.raises(StepError, match=r"backpropagated inside of its lane"):
        passes.backward((steps.model(inputs(1)).sum(), 1))
    for batch in passes.lanes():
        passes.backward((loss_of(steps, batch), len(batch)))
    with pytest.raises(StepError, match="inside of its lane"):
        passes.backward((steps.model(inputs(1)).sum(), 1))


def test_a_second_backward_for_a_lane_is_refused_by_its_number() -> None:
    steps = Steps()
    passes = steps.first_passes()
    lanes = passes.lanes()
    next(lanes)
    batch = next(lanes)
    passes.backward((loss_of(steps, batch), 1))
    with pytest.raises(StepError, match="lane 1 was backpropagated twice: add the losses up"):
        passes.backward((loss_of(steps, batch), 1))


def test_a_second_update_is_refused_by_its_step() -> None:
    steps = Steps()
    passes = steps.first_passes()
    assert not passes.updated
    passes.train(output_sum(steps.model))
    assert passes.updated
    with pytest.raises(StepError, match="step 0 was already updated"):
        passes.update()


def test_a_step_in_which_nothing_was_counted_is_refused() -> None:
    with pytest.raises(TaskError, match="step 0 counted nothing"):
        Steps().first_passes().update()


LOSS = torch.tensor(1.0, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "count", "message"),
    [
        (torch.ones(3, requires_grad=True), 3, r"not \(3,\): the mean"),
        (1.5, 3, "not float: the mean"),
        (torch.tensor(1.0), 3, "does not depend on any parameter"),
        (LOSS, -1, "count is -1"),
        (LOSS, float("nan"), "count is nan"),
        (LOSS, torch.ones(2), "count must be a number or a tensor of no dimensions"),
        (LOSS, torch.tensor(2.0, requires_grad=True), "without gradient"),
    ],
)
def test_a_loss_that_is_no_sum_with_its_count_is_refused(loss: Any, count: Any, message: str) -> None:
    with pytest.raises(StepError, match=message):
        check_loss(loss, count)


@pytest.mark.parametrize("count", [0, 2, 0.5, torch.tensor(0), torch.tensor(3.0)])
def test_any_count_from_zero_on_is_accepted(count: Any) -> None:
    check_loss(LOSS, count)


def test_a_frozen_parameter_that_gets_a_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(linear(), nn.Linear(1, 1))
    model[1].weight.requires_grad_(False)
    steps = Steps(model)
    passes = steps.first_passes()
    model[1].weight.requires_grad_(True)
    with pytest.raises(StepError, match=r"parameter 1\.weight was frozen when the run was prepared"):
        passes.train(output_sum(model))


# -- reading --------------------------------------------------------------------------------------


def test_what_a_loop_leaves_unread_is_reported_and_not_given_to_the_next_step() -> None:
    seen: list[int] = []
    steps = Steps(engine={"on_batch": lambda step, batch: seen.append(batch.lane)})
    every = steps.passes()
    passes = next(every)
    for batch in passes.lanes():
        passes.backward((loss_of(steps, batch), 1))
        break
    passes.update()
    assert seen == [0, 1, 2, 3]
    assert [batch.ids for batch in next(every).lanes()] == [(4,), (5,), (6,), (7,)]


def test_every_batch_is_reported_once_and_in_order() -> None:
    seen: list[tuple[int, int, Any]] = []
    steps = Steps(lanes=2, engine={"on_batch": lambda step, batch: seen.append((step, batch.lane, batch.ids))})
    for passes in steps.passes(2):
        list(passes.lanes())
        passes.train(output_sum(steps.model))
    assert seen == [(0, 0, (0, 1)), (0, 1, (2, 3)), (1, 0, (4, 5)), (1, 1, (6, 7))]


def test_flags_are_sent_once_in_a_step() -> None:
    calls: list[int] = []

    def flags() -> RankFlags:
        calls.append(1)
        return RankFlags(flag=float(len(calls)))

    steps = Steps(engine={"flags": flags})
    for number, passes in enumerate(steps.passes(2), start=1):
        passes.train(output_sum(steps.model))
        assert [rank.flag for rank in passes.stats.flags()()] == [number]
    assert len(calls) == 2


def test_lanes_that_are_empty_count_nothing_and_keep_their_place() -> None:
    steps = Steps(samples=5)
    data = next(steps.source.steps(Position(1), None))
    passes = LanePasses(steps.engine, data)
    loss = 2 * steps.model(inputs(5)[4]).item()
    passes.train(lambda batch: (2 * steps.model(batch.x).sum(), 3.0))
    assert [float(value) for value in passes.stats.values()] == [loss, 3.0, *[0.0] * 6]
    assert torch.allclose(steps.model.weight[0], 0.25 - LR * 2 * inputs(5)[4] / 3)


# -- random numbers -------------------------------------------------------------------------------


def draws(steps: Steps, extra: int = 0) -> dict[tuple[int, int], float]:
    """One number drawn in each lane of two steps, after so many others."""
    found = {}
    for passes in steps.passes(2):
        for batch in passes.lanes():
            found[passes.data.index, batch.lane] = torch.rand(()).item()
            torch.rand(extra)
            passes.backward((loss_of(steps, batch), 1))
        passes.update()
    return found


def test_a_lanes_draws_follow_from_the_step_and_the_lane_alone() -> None:
    plain = draws(Steps())
    assert len(set(plain.values())) == 8
    assert draws(Steps(), extra=7) == plain
    assert draws(Steps(seed=1)) != plain
    setup_of().rng.enter(MODEL, 2, at=(1,))
    assert torch.rand(()).item() == plain[1, 2]


@pytest.mark.parametrize("runs", ["lanes", "function"])
def test_draws_after_the_lanes_do_not_depend_on_the_last_lane(runs: str) -> None:
    steps = Steps()
    passes = steps.first_passes()
    list(passes.lanes() if runs == "lanes" else passes.enter_lanes())
    found = torch.rand(())
    setup_of().rng.enter(BETWEEN, at=(0,))
    assert torch.equal(found, torch.rand(()))


def test_a_loop_that_draws_nothing_between_lanes_is_not_seeded_there() -> None:
    steps = Steps(engine={"draws_between": False})
    passes = steps.first_passes()
    for _ in passes.lanes():
        torch.manual_seed(5)
    found = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(()))


# -- runners --------------------------------------------------------------------------------------


class Noting(WholeLanes):
    """A runner that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def run_step(self, passes: LanePasses, loss: LossFunction) -> None:
        self.calls.append(("step", passes.data.index))
        super().run_step(passes, loss)

    def run_lane(self, passes: LanePasses, batch: LaneBatch, loss: LossFunction) -> None:
        self.calls.append((batch.lane, batch.ids))
        super().run_lane(passes, batch, loss)


def test_a_runner_gets_the_lanes_in_order() -> None:
    runner = Noting()
    steps = Steps(samples=6, lanes=2, runner=runner)
    for passes in steps.passes(2):
        passes.train(output_sum(steps.model))
        assert passes.updated
    assert runner.calls == [("step", 0), (0, (0, 1)), (1, (2, 3)), ("step", 1), (0, (4, 5))]


class Elsewhere(Noting):
    """A runner whose lanes leave sums and losses that it hands in, as a CUDA graph does."""

    def run_step(self, passes: LanePasses, loss: LossFunction) -> None:
        engine, reduction = passes.engine, passes.engine.reduction
        batches = [passes.batches.on_device(batch) for batch in passes.batches.read_all()]
        rates = engine.update.begin(passes.data.index)
        engine.begin_lanes()
        lanes = [LaneStats(torch.tensor(1.0), len(batch)) for batch in batches]
        total: Grads = [sum((b.x.sum(0, keepdim=True) for b in batches), torch.zeros(()))]
        stats = reduction.gradients.share_recorded(RecordedSums([total], lanes), NO_FLAGS)
        reduction.gradients.exchange()
        reduction.gradients.finish(stats)
        updated = engine.update.change(stats, rates)
        engine.update.end(passes.data.index, stats, updated)
        passes.close(stats, updated, None)


@pytest.mark.parametrize("lanes", [1, 2])
def test_sums_of_lanes_that_ran_elsewhere_count_as_if_backward_had_run(lanes: int) -> None:
    steps = Steps(lanes=lanes, runner=Elsewhere())
    passes = steps.first_passes()
    passes.train(output_sum(steps.model))
    # One lane is divided by its count before its backward pass, not after it.
    mean = inputs(8)[:4].mean(0) if lanes == 2 else inputs(8)[:4].sum(0)
    assert torch.allclose(steps.model.weight[0], 0.25 - LR * mean)
    assert (steps.records[0].loss, steps.records[0].count) == (0.25 * lanes, 4)
    with pytest.raises(StepError, match="already updated"):
        passes.update()


# -- pieces ---------------------------------------------------------------------------------------


def pieces_of(batch: LaneBatch) -> list[LaneBatch]:
    parts = [(batch.x[:1], batch.ids[:1]), (batch.x[1:], batch.ids[1:])]
    return [LaneBatch(batch.lane, (x,), ids) for x, ids in parts]


def test_a_lane_in_pieces_counts_all_of_them() -> None:
    steps = Steps(lanes=1)
    passes = steps.first_passes()
    for batch in passes.lanes():
        passes.backward_in_pieces(pieces_of(batch), output_sum(steps.model))
    stats = passes.stats.values()
    assert [float(value) for value in stats] == [steps.model(inputs(4)).sum().item(), 4.0]


def test_a_bad_loss_of_any_piece_is_refused() -> None:
    steps = Steps(lanes=1)
    for bad in (1, 3):  # the first of two pieces, and the last

        def loss(batch: LaneBatch, bad: int = bad) -> tuple[Tensor, int]:
            found = steps.model(batch.x)
            return (found if len(batch) == bad else found.sum()), len(batch)

        passes = steps.first_passes()
        batch = next(passes.lanes())
        with pytest.raises(StepError, match=rf"not \({bad}, 1\)"):
            passes.backward_in_pieces(pieces_of(batch), loss)


def test_a_trial_counts_for_nothing() -> None:
    steps = Steps(lanes=1)
    passes = steps.first_passes()
    for batch in passes.lanes():
        passes.try_backward(batch, output_sum(steps.model))
        assert steps.model.weight.grad is not None
        steps.model.weight.grad = None
        passes.backward((loss_of(steps, batch), len(batch)))
    passes.update()
    assert torch.allclose(steps.model.weight[0], 0.25 - LR * inputs(8)[:4].mean(0))


def test_the_loss_runs_in_the_configs_precision_and_backward_outside_of_it() -> None:
    steps = Steps(lanes=2, precision="bf16")
    seen: list[tuple[torch.dtype, bool]] = []

    def loss(batch: LaneBatch) -> tuple[Tensor, int]:
        found = steps.model(batch.x)
        found.register_hook(lambda grad: seen.append((found.dtype, autocasts())))
        assert autocasts()
        return found.float().sum(), len(batch)

    steps.first_passes().train(loss)
    assert seen == [(torch.bfloat16, False)] * 2
    assert not autocasts()


def autocasts() -> bool:
    return torch.is_autocast_enabled("cpu")


def test_buffers_of_a_step_are_the_mean_over_its_lanes() -> None:
    model = nn.BatchNorm1d(2, momentum=0.5)
    steps = Steps(objects=[model, SGD(model.parameters(), lr=0.0)], lanes=2)
    passes = steps.first_passes()
    passes.train(output_sum(model))
    lanes = inputs(8)[:4].view(2, 2, 2)
    assert torch.allclose(model.running_mean, 0.5 * lanes.mean(1).mean(0))
    assert model.num_batches_tracked == 1
