"""Tensors of lanes: torch functions run once per lane, and nothing takes one lane for all."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import StepError
from samestep.step.lane_tensor import LaneSize, LaneTensor, LaneValue, join, lane_tensor, lanes_of, pick

EVEN = [torch.arange(6.0).view(2, 3), -torch.arange(6.0).view(2, 3)]
UNEVEN = [torch.ones(3, 2), torch.full((1, 2), 2.0)]


def of(parts: list[Tensor], lanes: tuple[int, ...] = (4, 5)) -> LaneTensor:
    return lane_tensor(lanes[: len(parts)], parts)


def values(tensor: Any) -> list[Any]:
    assert isinstance(tensor, LaneTensor)
    return [part.tolist() for part in tensor.per_lane]


FUNCTIONS = {
    "a method": lambda x: x.sum(1),
    "an operator": lambda x: 2 * x - 1,
    "a functional": lambda x: F.layer_norm(x, (3,)),
    "a list": lambda x: torch.cat([x, x + 1]),
    "indexing": lambda x: x[:, x.argmax(1)],
    "an ordinary table": lambda x: x.abs().long().clamp(max=2).to(torch.float32) @ torch.eye(3),
    "several results": lambda x: torch.max(x, 1)[1],
    "a slice by its size": lambda x: x[: x.size(0) // 2],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_run_once_per_lane(name: str) -> None:
    function = FUNCTIONS[name]
    assert values(function(of(EVEN))) == [function(part).tolist() for part in EVEN]


def test_gradients_reach_shared_weights_lane_by_lane() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (of(EVEN) * weight).sum()
    for part in loss.per_lane:
        part.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]
    assert loss.requires_grad


def test_changes_in_place_give_the_same_tensor() -> None:
    x = of([part.clone() for part in EVEN])
    same = x
    x += 1
    assert x is same
    assert x.mul_(2) is same
    x[:, 0] = 0
    assert values(x) == [[[0, 4, 6], [0, 10, 12]], [[0, 0, -2], [0, -6, -8]]]


def test_lengths_that_differ_are_followed() -> None:
    x = of(UNEVEN)
    size = x.size(0)
    assert isinstance(size, LaneSize)
    assert x.shape[1] == 2
    assert values(x.sum() / size) == [2.0, 4.0]
    assert values(torch.zeros_like(x).view(size * 2)) == [[0.0] * 6, [0.0] * 2]
    assert [pick(1 + 2 * size, at) for at in range(2)] == [7, 3]
    assert [pick(12 // size, at) for at in range(2)] == [4, 12]
    assert [pick(1 / size, at) for at in range(2)] == [1 / 3, 1.0]
    assert (size > 0) is True
    for wrong in (int, float, bool, lambda n: [0] * 5 if n > 2 else []):
        with pytest.raises(StepError, match="differs among the lanes of this step"):
            wrong(size)
    with pytest.raises(StepError, match=r"len\(x\) differs"):
        len(x)


class Output(NamedTuple):
    logits: Tensor
    name: str


def test_containers_and_objects_of_lanes_are_joined() -> None:
    made = join((0, 1), [Output(part, "net") for part in EVEN])
    assert isinstance(made, Output)
    assert values(made.logits) == [part.tolist() for part in EVEN]
    assert made.name == "net"
    nested = join((0, 1), [{"a": [part], "b": at} for at, part in enumerate(EVEN)])
    assert values(nested["a"][0]) == [part.tolist() for part in EVEN]
    assert isinstance(nested["b"], LaneSize)
    normal = join((0, 1), [torch.distributions.Normal(part, 1.0) for part in EVEN])
    assert isinstance(normal, LaneValue)
    assert values(normal.mean) == [part.tolist() for part in EVEN]
    assert len(lanes_of((1, [made.logits], {"b": nested["b"]}))) == 2


def test_sums_over_steps_keep_lanes_that_only_one_side_has() -> None:
    total: Any = 0
    total += of([torch.tensor(1), torch.tensor(2)])
    total += of([torch.tensor(5)])  # an epoch's last batch fills one lane
    total = total + lane_tensor((-1,), [torch.tensor(100)])  # and none of this rank's
    assert dict(zip(total.lanes, values(total), strict=True)) == {4: 6, 5: 2}
    with pytest.raises(StepError, match="mul got values of different lanes"):
        torch.mul(of(EVEN), of(EVEN[:1]))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: int(x.sum()),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: 1.0 in x,
    ],
)
def test_one_value_for_all_lanes_is_refused(wrong: Any) -> None:
    with pytest.raises(StepError, match=r"run\.sum\(value\) or run\.mean\(value\)"):
        wrong(of(EVEN))


def test_it_is_shown_and_copied() -> None:
    x = of(EVEN)
    assert repr(x) == "LaneTensor(2 lanes, each [2, 3])"
    assert f"{x}" == repr(x)
    other = copy.deepcopy(x)
    other.zero_()
    assert values(x) == [part.tolist() for part in EVEN]
    assert [values(row) for row in x] == [[p[0].tolist() for p in EVEN], [p[1].tolist() for p in EVEN]]


def test_random_numbers_need_a_loop() -> None:
    with pytest.raises(StepError, match="outside of the loop over the loader"):
        torch.rand_like(of(EVEN))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: torch.zeros(2, 3).add_(x),
        lambda x: torch.zeros(2, 3).scatter_(1, x.abs().long().clamp(max=2), 1.0),
        lambda x: torch.zeros(2, 3).__setitem__(x > 1, 5.0),
        lambda x: torch.nn.Parameter(torch.zeros(2, 3)).data.copy_(x),
        lambda x: torch.add(x, 1, out=torch.zeros(2, 3)),
    ],
)
def test_lanes_change_no_tensor_that_they_share(wrong: Any) -> None:
    with pytest.raises(StepError, match="changes an ordinary tensor by values of lanes"):
        wrong(of(EVEN))
    weight: Any = torch.nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(StepError, match="changes a parameter by values of lanes"):
        weight -= of(EVEN)


@torch.jit.script
def _scripted(a: Tensor) -> Tensor:
    return a.tanh().mean()


@pytest.mark.parametrize("function", [_scripted, torch.tensor, torch.vmap(lambda row: row.sum())])
def test_functions_below_torch_are_refused(function: Any) -> None:
    with pytest.raises((StepError, RuntimeError), match=r"run\.each_lane|TorchScript"):
        function(of(EVEN))
