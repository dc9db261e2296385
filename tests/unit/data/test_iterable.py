"""Steps of lane streams: their ends, their states, and their draws."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samestep.data.batch import Position
from samestep.data.factory import open_source
from samestep.data.iterable import Strided, lane_streams
from samestep.errors import TaskError
from samestep.pytree import digest
from tests.unit.contexts import TwoRanks
from tests.unit.data.sources import Letters, batches, contents, setup_of

# -- cutting --------------------------------------------------------------------------------------


def texts(dataset: Any, stop: int | None, **values: Any) -> list[list[list[str]]]:
    source = open_source(setup_of(**values), dataset, collate=list)
    return [[data for _, data, _ in step] for step in contents(source, stop)]


def test_each_lane_reads_its_own_stream_again_in_every_epoch() -> None:
    found = texts(Letters(2, 2), 3, lanes=2, global_batch=2)
    assert found == [[["0.0.0"], ["0.1.0"]], [["0.0.1"], ["0.1.1"]], [["1.0.0"], ["1.1.0"]]]


def test_uneven_streams_end_lane_by_lane() -> None:
    source = open_source(setup_of(lanes=2), Letters(5, 2), collate=list)
    found = [
        (data.units, data.ends_epoch, data.ragged, [len(batch) for batch in step]) for data, step in batches(source, 3)
    ]
    assert found == [((0, 1), False, False, [2, 2]), ((0,), False, False, [2]), ((0,), True, False, [1])]


def test_drop_last_ends_an_epoch_with_the_last_full_step() -> None:
    found = texts(Letters(5, 3), 2, lanes=2, drop_last=True)
    assert [step[0][0] for step in found] == ["0.0.0", "1.0.0"]


def test_a_set_length_ends_an_epoch_before_the_data_does() -> None:
    found = texts(Letters(9, 9), 3, lanes=2, steps_per_epoch=2)
    assert [step[0][0] for step in found] == ["0.0.0", "0.0.2", "1.0.0"]


@pytest.mark.parametrize("counts", [(0, 0), (3, 3)])
def test_data_without_a_full_step_is_refused(counts: tuple[int, int]) -> None:
    drop = {"drop_last": True, "global_batch": 8}
    with pytest.raises(TaskError, match="gave no full step in epoch 0"):
        texts(Letters(*counts), None, lanes=2, **drop)


def test_a_fused_rank_reads_all_its_lanes_as_one_batch() -> None:
    found = texts(Letters(2, 1, 2, 2), 2, same="samples")
    assert found == [[["0.0.0", "0.1.0", "0.2.0", "0.3.0"]], [["0.0.1", "0.2.1", "0.3.1"]]]


# -- ranks ----------------------------------------------------------------------------------------


def ranked(two_ranks: TwoRanks, other: Any, **values: Any) -> list[tuple[int, bool, bool]]:
    """Rank 0's steps, beside a rank whose streams are always like this."""
    two_ranks.other = other
    setup = setup_of(0, 2, lanes=2, global_batch=2, **values)
    object.__setattr__(setup, "context", two_ranks)
    source = open_source(setup, Letters(2, 2), collate=list)
    steps = source.steps(Position(), 3)
    return [(len(data.units), data.ragged, data.ends_epoch) for data in steps]


def test_a_rank_without_samples_takes_part_while_others_have_some(two_ranks: TwoRanks) -> None:
    found = ranked(two_ranks, (True, True))
    assert found == [(1, False, False), (1, False, False), (0, True, False)]


def test_a_rank_that_has_ended_makes_a_step_ragged(two_ranks: TwoRanks) -> None:
    assert ranked(two_ranks, (False, False)) == [(1, True, False), (1, True, True), (1, True, False)]


def test_with_drop_last_an_epoch_ends_with_the_first_rank(two_ranks: TwoRanks) -> None:
    with pytest.raises(TaskError, match="no full step"):
        ranked(two_ranks, (True, False), drop_last=True)


def test_a_set_length_spares_the_collective(two_ranks: TwoRanks) -> None:
    def refuse(value: Any) -> Any:
        raise AssertionError("nothing to agree on")

    two_ranks.gather = refuse  # type: ignore[method-assign]
    assert len(ranked(two_ranks, None, steps_per_epoch=2)) == 3


# -- resuming -------------------------------------------------------------------------------------


class Drawing:
    """Streams that draw while they are read."""

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterator[torch.Tensor]:
        for _ in range(7):
            yield torch.rand(()) + lane


class Shuffled:
    """Streams through a buffer: what is drawn in one step decides what a later one gives."""

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterator[int]:
        buffer: list[int] = []
        for number in range(7):
            buffer.append(100 * lane + number)
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        while buffer:
            yield buffer.pop(random.randrange(len(buffer)))


class Counting:
    """Streams with a state, which note how far they are read."""

    def __init__(self) -> None:
        self.opened: list[Any] = []
        self.taken = 0

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Any:
        return _Counter(self, lane)


class _Counter:
    def __init__(self, owner: Counting, lane: int) -> None:
        self.owner, self.lane, self.state = owner, lane, {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < 7:
            self.owner.taken += 1
            self.state["next"] += 1
            yield 100 * self.lane + self.state["next"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.owner.opened.append((self.lane, dict(state)))
        self.state = dict(state)


@pytest.mark.parametrize("after", range(6))
@pytest.mark.parametrize("make", [Drawing, Shuffled, Counting])
def test_a_resumed_stream_gives_what_is_left(make: Any, after: int) -> None:
    """Seven samples a lane in steps of two: four steps an epoch, the last of them half full."""
    source = open_source(setup_of(lanes=2), make())
    whole, position = [], Position()
    for data, step in batches(source, 8):
        whole.append([batch.data.tolist() for batch in step])
        if data.index == after:
            position = data.following
    left = contents(open_source(setup_of(lanes=2), make()), 8, position)
    assert [[data for _, data, _ in step] for step in left] == whole[after + 1 :]


def test_a_stream_with_a_state_is_not_read_again() -> None:
    source = open_source(setup_of(lanes=2), Counting())
    data = next(source.steps(Position(), None))
    again = Counting()
    contents(open_source(setup_of(lanes=2), again), 4, data.following)
    assert again.opened == [(0, {"next": 2}), (1, {"next": 2})]
    assert again.taken == 10, "five samples are left in each lane"


def test_the_state_of_a_step_is_not_that_of_what_was_read_ahead() -> None:
    source = open_source(setup_of(lanes=2), Counting())
    states = [dict(data.streams) for data in source.steps(Position(), 3)]
    assert [state[0]["next"] for state in states] == [2, 4, 6]


# -- workers and draws ----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loader_processes_change_neither_samples_nor_draws(workers: int) -> None:
    here = contents(open_source(setup_of(lanes=2), Drawing()), 5)
    ahead = open_source(setup_of(lanes=2, loader={"workers": workers}), Drawing())
    assert contents(ahead, 5) == here


@pytest.mark.requirement("000-P2-4", "004-CI-4")
def test_a_lanes_draws_do_not_depend_on_the_rank_that_reads_it() -> None:
    values: dict[str, Any] = {"lanes": 2, "steps_per_epoch": 3}
    alone = contents(open_source(setup_of(**values), Drawing()), 3)
    shared = [contents(open_source(setup_of(rank, 2, **values), Drawing()), 3) for rank in range(2)]
    assert [one + other for one, other in zip(*shared, strict=True)] == alone


# -- ids and kinds of streams ---------------------------------------------------------------------


def test_samples_get_digests_as_ids_on_request_only() -> None:
    for wanted in (False, True):
        source = open_source(setup_of(), Letters(1, 1, 1, 1), collate=list, digest=wanted)
        [(_, step)] = list(batches(source, 1))
        expected = [(digest(f"0.{lane}.0"),) if wanted else ("",) for lane in range(4)]
        assert [batch.ids for batch in step] == expected
        assert [len(batch) for batch in step] == [1, 1, 1, 1]


def test_strided_deals_a_plain_iterable_out_to_the_lanes() -> None:
    found = texts(Strided(range(7)), 2, lanes=2)
    assert found == [[[0, 2], [1, 3]], [[4, 6], [5]]]


def test_what_defines_no_streams_is_refused_with_the_three_ways() -> None:
    def samples() -> Iterable[int]:
        yield 1

    with pytest.raises(TaskError, match=r"generator has no length.*lane_stream.*samestep\.Strided"):
        lane_streams(samples())


class HuggingFace:
    """What we use of a Hugging Face dataset; it has a state, which loses a shuffle buffer."""

    def __init__(self, lane: int = 0, lanes: int = 1) -> None:
        self._lane, self._lanes, self._epoch = lane, lanes, -1

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[str]:
        return (f"{self._epoch}.{number}" for number in range(self._lane, 8, self._lanes))

    def state_dict(self) -> Any:
        raise AssertionError("it is read again instead")

    load_state_dict = state_dict


HuggingFace.__module__ = "datasets.iterable_dataset"


@pytest.mark.requirement("004-AO-2")
def test_a_hugging_face_dataset_is_split_by_lane_and_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(dataset: HuggingFace, rank: int, world_size: int) -> HuggingFace:
        return HuggingFace(rank, world_size)

    module = SimpleNamespace(split_dataset_by_node=split)
    monkeypatch.setitem(sys.modules, "datasets.distributed", module)
    found = texts(HuggingFace(), 3, lanes=2)
    assert found == [
        [["0.0", "0.2"], ["0.1", "0.3"]],
        [["0.4", "0.6"], ["0.5", "0.7"]],
        [["1.0", "1.2"], ["1.1", "1.3"]],
    ]


class DrawsWhenCalled:
    """An order that is drawn when the stream is opened, and not while it is read."""

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterable[float]:
        order = torch.rand(4).tolist()
        return (order[place] + random.random() for place in range(4))


def test_what_a_stream_draws_when_it_is_opened_follows_from_the_seed() -> None:
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        random.seed(noise)
        source = open_source(setup_of(lanes=2), DrawsWhenCalled(), collate=list)
        found.append([[data for _, data, _ in step] for step in contents(source, 2)])
    assert found[0] == found[1]
    assert found[0][0][0] != found[0][0][1], "each lane has its own"
