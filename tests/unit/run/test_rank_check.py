"""Whether all ranks hold the same state."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor, nn
from torch.optim import SGD, Adam

from samestep.errors import RanksDiffer
from samestep.run.rank_check import _checksums, _differences, _named_tensors, refuse_different_ranks
from tests.unit.contexts import TwoRanks


def checksum(tensor: Tensor) -> int:
    return _checksums([tensor])[0]


def swapped(tensor: Tensor) -> Tensor:
    other = tensor.clone()
    other[0], other[-1] = tensor[-1].clone(), tensor[0].clone()
    return other


def flipped(tensor: Tensor, place: int, bit: int) -> Tensor:
    other = tensor.clone()
    other.view(torch.uint8)[place] ^= 1 << bit
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_checksum_sees_bits_and_places(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.arange(1, 65).to(dtype)
    size = tensor.element_size()
    sums = [checksum(tensor), checksum(swapped(tensor)), checksum(tensor.roll(1))]
    sums += [checksum(flipped(tensor, place, bit)) for place in range(0, 64 * size, 7) for bit in range(8)]
    assert len(set(sums)) == len(sums)
    base, other = tensor.clone(), tensor.clone()  # one byte up, another one down: the plain sum of the bytes stays
    for one, values in ((base, [10, 20]), (other, [11, 19])):
        one.view(torch.uint8)[[0, 9]] = torch.tensor(values, dtype=torch.uint8)
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
    monkeypatch.setattr("samestep.run.rank_check._AT_ONCE", 8)
    tensor = torch.arange(1.0, 9.0)
    parts = tensor.view(-1, 2)
    reordered = parts.flip(0).reshape(-1)
    doubled = tensor.clone()
    doubled[2:4] = tensor[:2]
    sums = {checksum(t) for t in (tensor, reordered, doubled, swapped(tensor), tensor.roll(1))}
    assert len(sums) == 5


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        ([{"a": 1}, {"a": 1}], []),
        ([{"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 1}], ["a on rank 1 is not what it is on ranks 0, 2"]),
        (
            [{"b": 1, "a": 5}, {"b": 1, "a": 6}, {"b": 2, "a": 6}, {"b": 3, "a": 6}],
            ["a on rank 0 is not what it is on ranks 1, 2, 3", "b on ranks 2, 3 is not what it is on ranks 0, 1"],
        ),
        ([{"a": 1}, {}], ["a on rank 1 is not what it is on rank 0"]),
    ],
)
def test_what_differs_is_named_with_the_ranks_of_the_fewest(told: list[dict[str, int]], lines: list[str]) -> None:
    assert _differences(told) == lines


def test_weights_buffers_and_states_have_names() -> None:
    model, other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 1)
    optimizer = Adam([*model.parameters(), *other.parameters()])
    other(model(torch.randn(4, 3))).sum().backward()
    optimizer.step()
    names = _named_tensors([model, other], [optimizer], skip_buffers=False)
    assert {
        "model.0.weight", "model.1.running_mean", "extra0.bias", "optimizer0.0.weight.exp_avg",
        "optimizer0.extra0.weight.exp_avg_sq",
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


def test_ranks_that_are_the_same_pass_and_others_are_told(two_ranks: TwoRanks) -> None:
    model = nn.Linear(2, 2)
    mine = dict(zip(("model.weight", "model.bias"), _checksums([model.weight, model.bias]), strict=True))
    two_ranks.other = mine
    refuse_different_ranks(two_ranks, 5, [model], [], skip_buffers=False)
    two_ranks.other = {**mine, "model.bias": 0}
    with pytest.raises(RanksDiffer) as caught:
        refuse_different_ranks(two_ranks, 5, [model], [], skip_buffers=False)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "the ranks are not the same after step 5:",
        "  model.bias on rank 1 is not what it is on rank 0",
    ]
    assert caught.value.exit_code == 4


def test_of_many_differences_the_first_ones_are_shown(two_ranks: TwoRanks) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    two_ranks.other = {}
    with pytest.raises(RanksDiffer, match=r"\n  \.\.\. and 3 more\n") as caught:
        refuse_different_ranks(two_ranks, 5, [model], [], skip_buffers=False)
    assert str(caught.value).count(" is not what it is on ") == 5
