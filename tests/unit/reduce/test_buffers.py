"""Buffers that forward changes: the same start for every lane, the mean of their changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.errors import TaskError
from samestep.reduce.buffer_slots import Concatenate, keep_buffers
from samestep.reduce.buffers import LaneBuffers, changing_buffers


class Holder(nn.Module):
    """Holds buffers, and nothing else."""

    def __init__(self, *buffers: Tensor, **named: Tensor) -> None:
        super().__init__()
        for name, buffer in {**{f"b{i}": b for i, b in enumerate(buffers)}, **named}.items():
            self.register_buffer(name, buffer)


def joined(module: nn.Module, lanes: int = 4, warnings: list[str] | None = None) -> LaneBuffers:
    warn = (lambda line: None) if warnings is None else warnings.append
    return LaneBuffers([module], [range(lanes)], SoloCollectives(Activity()), warn)


def buffers_of(buffers: Sequence[Tensor], lanes: int = 4) -> LaneBuffers:
    return joined(Holder(*buffers), lanes)


def run_lanes(found: LaneBuffers, *lanes: Callable[[], object], at: Sequence[int] | None = None) -> None:
    """A step in which each lane does something; `at` has their numbers, if not from 0."""
    found.begin_step()
    for lane, forward in zip(range(len(lanes)) if at is None else at, lanes, strict=True):
        found.enter_lane()
        forward()
        found.leave_lane(lane)
    found.start()
    found.wait()
    found.finish()


def run_step(found: LaneBuffers, buffer: Tensor, changes: dict[int, float]) -> list[float]:
    """A step in which each lane adds a number; returns where each lane started."""
    starts: list[float] = []

    def forward(change: float) -> None:
        starts.append(buffer.flatten()[0].item())
        buffer.add_(change)

    run_lanes(found, *[lambda c=c: forward(c) for c in changes.values()], at=[*changes])
    return starts


def test_every_lane_starts_from_the_steps_buffers() -> None:
    buffer = torch.full((2,), 10.0)
    assert run_step(buffers_of([buffer]), buffer, {0: 1.0, 1: 2.0, 2: 3.0, 3: 6.0}) == [10.0] * 4
    assert buffer.tolist() == [13.0, 13.0]


@pytest.mark.parametrize("lanes", [{1: 4.0}, {0: 3.0, 3: 5.0}, {2: 4.0, 3: 4.0}])
def test_the_mean_is_over_lanes_with_samples(lanes: dict[int, float]) -> None:
    buffer = torch.zeros(1)
    run_step(buffers_of([buffer]), buffer, lanes)
    assert buffer.item() == 4.0


def test_a_step_without_lanes_leaves_buffers_as_they_were() -> None:
    buffer = torch.tensor([-0.0])
    run_step(buffers_of([buffer]), buffer, {})
    assert str(buffer.item()) == "-0.0"


def test_steps_follow_from_each_other() -> None:
    buffer = torch.zeros(1)
    found = buffers_of([buffer])
    assert run_step(found, buffer, {0: 1.0, 1: 3.0}) == [0.0, 0.0]
    assert run_step(found, buffer, {0: 2.0, 1: 2.0}) == [2.0, 2.0]
    assert buffer.item() == 4.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("changes", "expected"), [((1, 1), 1), ((1, 2), 2), ((3, 4), 4), ((5, 6), 6), ((-1, -2), -2), ((-3, -4), -4)]
)
def test_counters_are_rounded(dtype: torch.dtype, changes: tuple[int, int], expected: int) -> None:
    """1.5 becomes 2 and 3.5 becomes 4: to even, on both sides of zero, the same on every rank."""
    counter = torch.zeros((), dtype=dtype)
    run_step(buffers_of([counter], lanes=2), counter, dict(enumerate(changes)))
    assert counter.item() == expected
    assert counter.dtype == dtype


def test_buffers_of_different_types_and_shapes_keep_them() -> None:
    buffers = [torch.zeros(2, 3), torch.zeros((), dtype=torch.float64), torch.zeros(1).half()]
    run_lanes(buffers_of(buffers, lanes=2), *[lambda: [b.add_(n) for n, b in enumerate(buffers, 1)]] * 2)
    assert [buffer.flatten().tolist() for buffer in buffers] == [[1.0] * 6, [2.0], [3.0]]
    assert [buffer.dtype for buffer in buffers] == [torch.float32, torch.float64, torch.float16]


def test_one_lane_in_all_changes_buffers_once_whatever_its_passes() -> None:
    buffer = torch.zeros(1)
    found = buffers_of([buffer], lanes=1)
    found.begin_step()
    for _ in range(2):  # a second pass over the lane starts over
        found.enter_lane()
        buffer += 1
    found.leave_lane(0)
    found.start()
    found.wait()
    found.finish()
    assert buffer.item() == 1.0


def test_a_model_without_buffers_needs_nothing() -> None:
    run_step(buffers_of([]), torch.zeros(1), {0: 1.0, 1: 2.0})


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("statistics", torch.zeros(2))
        self.register_buffer("constant", torch.ones(2), persistent=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.norm = nn.BatchNorm1d(2)


def test_buffers_that_a_state_dict_holds_may_change() -> None:
    model = Buffers()
    found = changing_buffers([model, model.norm])
    expected = [model.statistics, model.mask, *model.norm.buffers()]
    assert [id(buffer) for buffer in found] == [id(buffer) for buffer in expected]


def test_buffers_are_kept_also_after_an_error() -> None:
    model = nn.BatchNorm1d(2)

    def trial() -> None:
        with keep_buffers([model]):
            model(torch.randn(4, 2) + 5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trial()
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [0, 0]
    assert model.num_batches_tracked == 0


# One arithmetic for every type


@pytest.mark.parametrize("lanes", [2, 3, 5])
def test_what_no_lane_changes_keeps_its_bits(lanes: int) -> None:
    """Also where the mean of equal numbers is rounded: 0.1 + 0.1 + 0.1 is not 3 * 0.1."""
    values = [0.1, float("inf"), float("nan"), 1e300]
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
    buffers = [torch.tensor(values, dtype=kind) for kind in kinds]
    buffers += [torch.tensor([2**62 + 1, -3]), torch.tensor([True, False])]
    before = [buffer.clone() for buffer in buffers]
    run_lanes(buffers_of(buffers, lanes), *[lambda: None] * lanes)
    for old, new in zip(before, buffers, strict=True):
        assert old.view(torch.uint8).tolist() == new.view(torch.uint8).tolist()


def test_small_changes_of_narrow_types_are_added_up_before_they_are_rounded() -> None:
    narrow = torch.ones(1, dtype=torch.bfloat16)
    changes = [lambda: narrow.add_(2**-7), *[lambda: None] * 3]
    run_lanes(buffers_of([narrow]), *changes)
    assert narrow.item() == 1.0  # a quarter of the smallest change there is
    run_lanes(buffers_of([narrow]), *[lambda: narrow.add_(2**-7)] * 4)
    assert narrow.item() == 1.0 + 2**-7


def test_integers_are_added_up_exactly() -> None:
    counter = torch.tensor([2**61])
    run_lanes(buffers_of([counter], 2), lambda: counter.add_(2**59 + 1), lambda: counter.sub_(3))
    assert counter.item() == 2**61 + 2**58 - 1


@pytest.mark.parametrize(
    ("start", "lanes", "expected"), [(False, (0, 1, 0), True), (False, (0, 0, 0), False), (True, (0, 0), False)]
)
def test_a_flag_is_set_if_a_lane_sets_it_and_cleared_if_all_do(
    start: bool, lanes: tuple[int, ...], expected: bool
) -> None:
    flag = torch.tensor([start])
    run_lanes(buffers_of([flag], len(lanes)), *[lambda v=v: flag.fill_(bool(v)) for v in lanes])
    assert flag.item() is expected


def test_imaginary_parts_move_too() -> None:
    spectrum = torch.zeros(1, dtype=torch.complex64)
    run_lanes(buffers_of([torch.zeros(3), spectrum], 2), lambda: spectrum.add_(1 + 3j), lambda: spectrum.add_(3 - 1j))
    assert spectrum.item() == 2 + 1j


def test_from_infinity_lanes_values_count() -> None:
    smallest = torch.full((1,), float("inf"))
    run_lanes(buffers_of([smallest], 2), lambda: smallest.fill_(2.0), lambda: smallest.fill_(4.0))
    assert smallest.item() == 3.0


# Lanes that are recorded


def record_lanes(found: LaneBuffers, lanes: dict[int, Callable[[], object]]) -> None:
    """A step whose lanes do not see each other, as if they ran side by side."""
    found.begin_step()
    for lane, forward in lanes.items():
        with found.beside_others(lane):
            forward()
    found.record()
    found.start_recorded()
    found.wait()
    found.finish()


@pytest.mark.parametrize("missing", [(), (0,), (1, 4), (0, 1, 2, 3)])
def test_recorded_lanes_give_the_bits_of_lanes_one_after_the_other(missing: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    start = {
        "mean": torch.randn(3), "low": torch.randn(2).bfloat16(), "turn": torch.randn(2).cfloat(),
        "count": torch.tensor(7), "flag": torch.tensor([False, True]), "limit": torch.tensor(-torch.inf),
    }  # fmt: skip
    eager, recorded = (Holder(**{n: b.clone() for n, b in start.items()}) for _ in range(2))
    again = recorded.mean
    recorded.alias = nn.Module()
    recorded.alias.register_buffer("mean", again, persistent=False)

    def forward(module: Holder, lane: int) -> None:
        module.mean.mul_(0.9).add_(0.1 * lane)
        module.low += lane / 3
        module.turn = module.turn * (1 + 0.1j * lane)  # another tensor in its place
        module.count += 3 * lane + 1
        module.flag |= torch.tensor([lane == 3, False])
        module.limit.fill_(max(float(module.limit), lane))

    lanes = [lane for lane in range(6) if lane not in missing]
    found, other = joined(eager, 6), joined(recorded, 6)
    for _ in range(3):
        run_lanes(found, *[lambda lane=lane: forward(eager, lane) for lane in lanes], at=lanes)
        record_lanes(other, {lane: lambda lane=lane: forward(recorded, lane) for lane in lanes})
    for name, buffer in eager.named_buffers():
        assert torch.equal(buffer, recorded.get_buffer(name)), name
    assert recorded.mean is again
    assert recorded.alias.mean is again


def test_values_that_come_by_way_of_the_host_keep_lanes_from_being_recorded() -> None:
    module = declared({"seen": "last"}, seen=torch.zeros(1))
    assert "buffer seen takes lanes' values" in (joined(module).why_not_recorded or "")
    assert joined(module, lanes=1).why_not_recorded is None
    assert buffers_of([torch.zeros(1)]).why_not_recorded is None


# Other tensors in a buffer's place


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_buffer_that_is_assigned_is_followed(lanes: int) -> None:
    module = Holder(m=torch.zeros(2))
    own = module.m

    def forward() -> None:
        module.m = 0.5 * module.m + 1.0

    found = joined(module, lanes)
    run_lanes(found, *[forward] * lanes)
    assert own.tolist() == [1.0, 1.0]
    assert module.m is own
    run_lanes(found, *[forward] * lanes)
    assert own.tolist() == [1.5, 1.5]


@pytest.mark.parametrize("other", [None, torch.zeros(3), torch.zeros(2, dtype=torch.complex64)])
def test_a_buffer_that_becomes_something_else_is_refused(other: Tensor | None) -> None:
    module = Holder(m=torch.zeros(2))

    def forward() -> None:
        module.m = other

    with pytest.raises(TaskError, match=r"buffer m was \(2,\) of torch.float32 and is"):
        run_lanes(joined(module, 2), forward, forward)


def test_a_buffer_that_appears_is_refused() -> None:
    module = nn.Module()
    module.register_buffer("m", None)

    def forward() -> None:
        module.m = torch.ones(1)

    with pytest.raises(TaskError, match="buffer m was None when the run was prepared"):
        run_lanes(joined(module, 2), forward, forward)


# As declared


def declared(joins: object, **buffers: Tensor) -> Holder:
    module = Holder(**buffers)
    module.buffer_joins = joins  # type: ignore[assignment]
    return module


def test_sums_and_last_lanes() -> None:
    module = declared(
        {"used": "sum", "seen": "last", "count": "sum"},
        used=torch.ones(2), seen=torch.zeros(1), count=torch.tensor(5), mean=torch.zeros(1),
    )  # fmt: skip

    def forward(lane: int) -> None:
        for buffer in module.buffers():
            buffer += lane + 1

    run_lanes(joined(module, 3), *[lambda lane=lane: forward(lane) for lane in range(3)])
    assert module.used.tolist() == [7.0, 7.0]
    assert module.count.item() == 11
    assert module.seen.item() == 3.0
    assert module.mean.item() == 2.0


def queue(length: int) -> Holder:
    return declared(
        {"queue": Concatenate(pointer="at", dim=1)}, queue=torch.zeros(2, length), at=torch.zeros(1, dtype=torch.int64)
    )


def enqueue(module: Holder, key: float) -> None:
    """As MoCo does it."""
    at = int(module.at)
    module.queue[:, at : at + 2] = key
    module.at[0] = (at + 2) % module.queue.shape[1]


def test_a_queue_takes_what_all_lanes_wrote_in_lane_order() -> None:
    module = queue(6)
    found = joined(module, 2)
    run_lanes(found, lambda: enqueue(module, 1), lambda: enqueue(module, 2))
    assert module.queue.tolist() == [[1, 1, 2, 2, 0, 0]] * 2
    assert module.at.item() == 4
    run_lanes(found, lambda: enqueue(module, 3), lambda: enqueue(module, 4))
    assert module.queue.tolist() == [[4, 4, 2, 2, 3, 3]] * 2
    assert module.at.item() == 2


def test_a_queue_shorter_than_a_step_is_refused() -> None:
    module = queue(3)
    with pytest.raises(TaskError, match=r"queue has 3 places, but .* wrote 4"):
        run_lanes(joined(module, 2), lambda: enqueue(module, 1), lambda: enqueue(module, 2))


@pytest.mark.parametrize(
    ("joins", "match"),
    [
        ({"m": "median"}, "joins m by 'median': give mean, sum, last or samestep.Concatenate"),
        ({"n": "sum"}, "names 'n'; its buffers are: m"),
        (["m"], "must be a mapping"),
        ({"m": Concatenate(pointer="at")}, "has the pointer 'at', which is no buffer"),
    ],
)
def test_declarations_that_cannot_be_are_refused(joins: object, match: str) -> None:
    with pytest.raises(TaskError, match=match):
        joined(declared(joins, m=torch.zeros(1)))


# Large ones


def test_large_buffers_that_never_change_are_left_out() -> None:
    module = Holder(mask=torch.ones(1 << 15), m=torch.zeros(1))
    found = joined(module, 2)
    run_lanes(found, *[lambda: module.m.add_(1)] * 2)
    assert [slot.path for slot, _ in found._joined] == ["m"]
    run_lanes(found, *[lambda: module.m.add_(1)] * 2)
    assert module.m.item() == 2.0
    with pytest.raises(TaskError, match=r"buffer mask .* did not change in the first step"):
        run_lanes(found, *[lambda: module.mask.add_(1)] * 2)


def test_a_large_buffer_that_changes_is_warned_about_unless_declared() -> None:
    for joins, count in (({}, 1), ({"codes": "mean"}, 0)):
        module = declared(joins, codes=torch.zeros(1 << 15))
        warnings: list[str] = []
        found = joined(module, 2, warnings)
        for _ in range(2):
            run_lanes(found, *[lambda: module.codes.add_(1)] * 2)  # noqa: B023
        assert len(warnings) == count
        assert all("buffer codes (32768,) changes in forward" in line for line in warnings)
        assert module.codes[0] == 2.0


def test_others_than_lanes_may_write_to_a_constant_buffer() -> None:
    """As a moving average that is swapped in, or a skipped step that puts buffers back."""
    module = Holder(mask=torch.ones(1 << 15), m=torch.zeros(1))
    found = joined(module, 2)
    for _ in range(3):
        run_lanes(found, *[lambda: module.m.add_(1)] * 2)
        module.mask.copy_(module.mask.clone())


def test_a_mask_of_minus_infinity_is_constant() -> None:
    module = Holder(mask=torch.full((1 << 15,), -torch.inf))
    warnings: list[str] = []
    found = joined(module, 2, warnings)
    run_lanes(found, *[lambda: None] * 2)
    assert not warnings
    assert found._joined == []


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_assigned_buffer_may_be_needed_by_backward(lanes: int) -> None:
    module = Holder(m=torch.ones(2))
    weight = torch.ones(2, requires_grad=True)
    found = joined(module, lanes)
    found.begin_step()
    for lane in range(lanes):
        found.enter_lane()
        loss = (weight * module.m).sum()
        module.m = 0.5 * module.m
        found.leave_lane(lane)
        loss.backward()
    found.start()
    found.wait()
    found.finish()
    assert module.m.tolist() == [0.5, 0.5]


def test_a_lane_that_writes_without_its_pointer_is_refused() -> None:
    module = queue(4)

    def forward() -> None:
        module.queue[:, 3] = 1.0

    with pytest.raises(TaskError, match=r"queue: a lane wrote elsewhere than into the 0 places"):
        run_lanes(joined(module, 2), forward, forward)
    module = queue(2)  # filled by one lane: the pointer is where it was
    with pytest.raises(TaskError, match="make the queue longer"):
        run_lanes(joined(module, 2), *[lambda: enqueue(module, 1)] * 2)


def test_buffers_in_which_all_lanes_leave_the_same_stay_as_they_are_to_the_bit() -> None:
    """Where the sum of changes, over an odd number of lanes or far from the start, would round."""
    new = torch.tensor([0.1, 1e-3], dtype=torch.float64)

    class Both(Holder):
        buffer_joins = {"seen": "last"}  # noqa: RUF012

    holder = Both(mean=torch.tensor([1.7, 1e10], dtype=torch.float64), seen=torch.zeros(1))
    alike = [holder.mean]
    found = LaneBuffers([holder], [range(3)], SoloCollectives(Activity()), alike=alike)  # type: ignore[list-item]
    run_lanes(found, *[lambda: holder.mean.copy_(new)] * 3)  # type: ignore[operator, union-attr]
    assert torch.equal(holder.mean, new)  # type: ignore[arg-type]
    found.restore()
    assert holder.mean.tolist() == [1.7, 1e10]  # type: ignore[operator, union-attr]
