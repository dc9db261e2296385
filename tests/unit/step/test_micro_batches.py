"""Lanes in micro-batches, the search for one that fits, and activations computed again."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.config import load_config
from samestep.data.batch import LaneBatch
from samestep.distributed.context import SingleProcessContext
from samestep.errors import CheckpointError, OutOfMemory, TaskError
from samestep.run_setup import RunSetup
from samestep.step.activation_checkpointing import checkpoint_activations
from samestep.step.compilation import _compile
from samestep.step.micro_batches import MicroBatches, cut_batch, out_of_memory

Pair = namedtuple("Pair", "x y")
IDS = (7, 8, 9, 10, 11)


def batch(data: Any) -> LaneBatch:
    return LaneBatch(3, data, IDS)


# Cutting


def test_every_tensor_is_cut_however_deep_it_lies() -> None:
    rows = torch.arange(10).view(5, 2)
    names = ["a", "b", "c", "d", "e"]
    whole = batch({"in": Pair(rows, [rows[:, 0], names]), "also": (rows + 1, None, 0.5, "all")})
    parts = cut_batch(whole, 2)
    assert [len(part) for part in parts] == [2, 2, 1]
    assert [part.ids for part in parts] == [(7, 8), (9, 10), (11,)]
    assert {part.lane for part in parts} == {3}
    for part, cut in zip(parts, (slice(0, 2), slice(2, 4), slice(4, 6)), strict=True):
        inner = part.data["in"]
        assert type(inner) is Pair
        assert torch.equal(inner.x, rows[cut])
        assert torch.equal(inner.y[0], rows[cut, 0])
        assert inner.y[1] == names[cut]
        assert torch.equal(part.data["also"][0], rows[cut] + 1)
        assert part.data["also"][1:] == (None, 0.5, "all")


@pytest.mark.parametrize("size", [5, 6])
def test_a_batch_that_is_small_enough_stays_as_it_is(size: int) -> None:
    whole = batch(object())
    assert cut_batch(whole, size) == [whole]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ((torch.zeros(5, 2), torch.zeros(2, 5)), r"memory.lane_split: a batch of 5 .* tensor of shape \(2, 5\)"),
        ((torch.zeros(5, 2), torch.tensor(1.0)), r"tensor of shape \(\)"),
        ({"x": object()}, "holds a object. Use tensors, lists and mappings"),
    ],
)
def test_what_cannot_be_cut_is_named(data: Any, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        cut_batch(batch(data), 2)


# Searching


class Search:
    """Micro-batches on a device that holds so many samples at once."""

    def __init__(self, asked: int | str = "auto", lane_batch: int = 6) -> None:
        self.model = nn.BatchNorm1d(2)
        self.outside = nn.Parameter(torch.ones(2, 1))
        self.context = SingleProcessContext()
        self.said: list[str] = []
        self.context.log.main = self.said.append  # type: ignore[method-assign]
        params = [*self.model.parameters(), self.outside]
        config = load_config({"global_batch": lane_batch, "lanes": 1, "steps": 1, "memory": {"lane_split": asked}})
        setup = RunSetup.create(config, self.context)
        self.split = MicroBatches(setup, [self.model], params)
        self.tried: list[int] = []

    def find(self, fits: int) -> int | None:
        lanes = LaneBatch(0, torch.randn(6, 2, 4), tuple(range(6)))

        def attempt(piece: LaneBatch) -> None:
            self.tried.append(len(piece))
            (self.model(piece.data) * self.outside).sum().backward()
            if len(piece) > fits:
                raise torch.OutOfMemoryError("pretended")

        self.split.search(lanes, attempt)
        return self.split.pieces


@pytest.mark.parametrize(("fits", "tried"), [(6, [6]), (3, [6, 3, 3]), (2, [6, 3, 2, 2, 2])])
def test_the_search_stops_at_the_first_that_fits(fits: int, tried: list[int]) -> None:
    search = Search()
    before = copy.deepcopy(search.model.state_dict())
    search.find(fits)
    assert search.tried == tried
    assert all(torch.equal(now, before[name]) for name, now in search.model.state_dict().items())
    assert all(param.grad is None for param in (*search.model.parameters(), search.outside))


def test_what_it_found_is_said_as_what_to_ask_for() -> None:
    """Six samples cut in four are three micro-batches of two."""
    search = Search()
    search.find(2)
    assert "each lane of 6 samples in 3 micro-batches of 2" in search.said[0]
    assert search.said[0].endswith("memory.lane_split: 3 makes it the same run on any machine")
    assert [search.split._size(pieces) for pieces in (3, search.split.pieces or 0)] == [2, 2]
    whole = Search()
    whole.find(6)
    assert whole.said == ["memory.lane_split: auto: a lane of 6 samples fits as it is"]


def test_if_not_even_one_sample_fits_it_says_what_else_to_do() -> None:
    search = Search()
    with pytest.raises(OutOfMemory, match=r"even one sample does not, on cpu.*memory\.checkpoint"):
        search.find(0)
    assert search.tried == [6, 3, 2, 1], "each size once, and no further piece after one failed"


def test_it_goes_on_until_it_fits_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search()
    answers = [[True, False], [True, True]]
    monkeypatch.setattr(search.context, "gather", lambda fits: answers.pop(0))
    assert search.find(6) == 2
    assert search.tried == [6, 3, 3]


def test_another_error_is_not_taken_for_too_little_memory() -> None:
    search = Search()

    def attempt(piece: LaneBatch) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        search.split.search(batch(torch.zeros(5)), attempt)


def test_more_micro_batches_than_samples_are_refused() -> None:
    assert Search(6).split.pieces == 6
    with pytest.raises(TaskError, match=r"memory\.lane_split is 7, but a lane has 6 samples"):
        Search(7)


def test_a_split_that_was_found_is_kept_and_another_one_refused() -> None:
    search = Search()
    search.find(2)
    state = search.split.state_dict()
    again = Search()
    again.split.load_state_dict(state)
    assert again.split.pieces == search.split.pieces
    Search(3).split.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"memory\.lane_split was 4, is 2"):
        Search(2).split.load_state_dict(state)


def test_too_little_memory_is_told_with_the_lane_and_what_to_change() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore words")
    said = str(out_of_memory(error, torch.device("cuda", 1), 32, "in step 4"))
    assert "cuda:1 has too little memory in step 4, with 32 samples in a lane" in said
    assert "memory.lane_split: auto" in said
    assert said.endswith("torch reported: CUDA out of memory. Tried to allocate 2 GiB")
    assert "distributed.shard" not in said
    several = str(out_of_memory(error, torch.device("cuda", 1), 32, "in step 4", could_shard="optimizer"))
    assert "Set distributed.shard: optimizer to deal optimizer states out to the ranks, memory." in several


# Activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(torch.tanh(self.norm(self.linear(x))))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def deep() -> Deep:
    torch.manual_seed(0)
    return Deep()


def trained(model: Deep) -> list[Tensor]:
    """Gradients and buffers after one pass."""
    torch.manual_seed(5)
    model(torch.randn(8, 3)).sum().backward()
    return [*(param.grad for param in model.parameters()), *model.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("patterns", "chosen", "calls"),
    [
        (["blocks.[02]"], ["blocks.0", "blocks.2"], [2, 1, 2]),
        (["blocks.*", "blocks.1"], ["blocks.0", "blocks.1", "blocks.2"], [2, 2, 2]),
        (["blocks.1.linear", "last"], ["blocks.1.linear", "last"], [1, 1, 1]),
    ],
)
def test_the_modules_that_match_compute_again_and_change_no_bit(
    patterns: list[str], chosen: list[str], calls: list[int]
) -> None:
    plain, again = deep(), deep()
    assert checkpoint_activations(again, patterns) == chosen
    expected, found = trained(plain), trained(again)
    assert [block.calls for block in again.blocks] == calls  # type: ignore[union-attr]
    assert all(map(torch.equal, expected, found)), "BatchNorm's statistics moved once"


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_such_a_model_is_a_model_of_its_own(twin: Callable[[Deep], Deep]) -> None:
    first = deep()
    checkpoint_activations(first, ["blocks.0"])
    second = twin(first)
    trained(second)
    assert first.blocks[0].calls == 0
    assert float(first.blocks[0].norm.num_batches_tracked) == 0  # type: ignore[union-attr, arg-type]
    assert float(second.blocks[0].norm.num_batches_tracked) == 1  # type: ignore[union-attr, arg-type]


def test_a_pattern_that_matches_nothing_is_refused_before_anything_is_changed() -> None:
    model = deep()
    with pytest.raises(TaskError, match=r"'block' matches no module; the model has blocks, last"):
        checkpoint_activations(model, ["blocks.0", "block"])
    trained(model)
    assert [block.calls for block in model.blocks] == [1, 1, 1]
    with pytest.raises(TaskError, match="the model has none inside of it"):
        checkpoint_activations(nn.Linear(1, 1), ["x"])


def test_a_model_of_torchs_own_class_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch passes over the forward of its own classes, such as nn.Sequential's, when it is outermost."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, dynamic: plain(what, backend=counter))
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(2, 3)
    expected = model(x)
    with torch._dynamo.config.patch(cache_size_limit=8, fail_on_cache_limit_hit=False):
        _compile(model)
        assert torch.equal(model(x), expected)
    assert counter.frame_count == 1
