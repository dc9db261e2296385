"""Parameters that a forward pass changes are refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from samestep.errors import TaskError
from tests.unit.step.engines import Steps, output_sum


class Follower(nn.Module):
    """A frozen copy that follows in forward, from some call on."""

    def __init__(self, first: int = 0, by_data: bool = False) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
        self.calls, self.first, self.by_data = 0, first, by_data

    def forward(self, x: Tensor) -> Tensor:
        if self.calls >= self.first:
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                with torch.no_grad():
                    (slow.data if self.by_data else slow).lerp_(fast, 0.5)
        self.calls += 1
        out: Tensor = self.fast(x) + self.slow(x)
        return out


def run(model: Follower, steps: int = 3, **values: Any) -> None:
    objects = [model, SGD(model.fast.parameters(), lr=0.1)]
    for passes in Steps(model, objects=objects, samples=12, **values).passes(steps):
        passes.train(output_sum(model))


@pytest.mark.parametrize("by_data", [False, True])
def test_a_parameter_that_follows_in_forward_is_refused(by_data: bool) -> None:
    with pytest.raises(TaskError, match=r"lane 0 changed the parameters slow.weight, slow.bias"):
        run(Follower(by_data=by_data))


def test_it_is_found_in_any_lane_of_the_first_steps() -> None:
    with pytest.raises(TaskError, match=r"forward pass of lane 2 .* after_update\(self, step\)"):
        run(Follower(first=6))


def test_later_changes_are_found_with_the_check_of_ranks() -> None:
    run(Follower(first=8))
    with pytest.raises(TaskError, match="lane 0 changed the parameters"):
        run(Follower(first=8), check_ranks_every=2)


def test_the_update_itself_is_no_change_in_forward() -> None:
    run(Follower(first=100), check_ranks_every=1)


def test_extra_modules_are_looked_at_too() -> None:
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)

    def loss(batch: Any) -> tuple[Tensor, int]:
        out = head(model(batch.x)).sum()
        with torch.no_grad():
            head.bias.zero_()
        return out, len(batch)

    objects = [model, head, SGD([*model.parameters(), *head.parameters()], lr=0.1)]
    with pytest.raises(TaskError, match=r"module 1\.bias"):
        Steps(model, objects=objects).first().train(loss)


class Cached(nn.Module):
    """A buffer that no checkpoint holds: a cache that grows, or something that training moves."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.linear, self.grows = nn.Linear(2, 1), grows
        self.cache: Tensor
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.ones(2) if self.grows else self.cache + 1
        out: Tensor = self.linear(x) + self.cache.sum()
        return out


@pytest.mark.parametrize("grows", [True, False])
def test_a_buffer_that_no_checkpoint_holds_may_grow_but_not_change(grows: bool) -> None:
    model = Cached(grows)
    words = r"changed the buffer cache, .* persistent=False"
    with nullcontext() if grows else pytest.raises(TaskError, match=words):
        Steps(model, objects=[model, SGD(model.parameters(), lr=0.1)]).first().train(output_sum(model))


class Hidden(nn.Module):
    """Keeps something that no checkpoint holds."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(2, 1), what
        self.calls, self.noise, self.mean = 0, torch.Generator().manual_seed(1), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "calls":
            self.calls += 1
        if self.what == "noise":
            x = x + torch.randn(x.shape, generator=self.noise)
        if self.what == "mean":
            self.mean = self.mean + 1
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("what", ["calls", "noise", "mean", ""])
def test_state_that_no_checkpoint_holds_is_warned_about_once(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Hidden(what))
    for passes in Steps(model, objects=[model, SGD(model.parameters(), lr=0.1)]).passes(4):
        passes.train(output_sum(model))
    assert capsys.readouterr().err.count(f"forward changes 0.{what}, which") == bool(what)
