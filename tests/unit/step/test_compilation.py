"""Blocks are compiled one by one, and many of them fit into torch's limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from samestep.config import load_config
from samestep.errors import TaskError
from samestep.step.compilation import _COMPILED_SHAPES, compile_model


class Numbered(nn.Module):
    """Differs from every other by a number that its forward pass reads."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) / (1000 + self.number)


def _config(**values: Any) -> Any:
    speed = {"speed": {"compile": "blocks"}}
    return load_config({"global_batch": 8, "epochs": 1, **speed, **values})


@pytest.mark.variation("test_a_compiled_model_is_the_same_run_too: by blocks, with many shapes")
def test_as_many_shapes_per_block_as_of_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, dynamic: plain(what, backend="eager"))
    model = nn.Sequential(*(Numbered(number) for number in range(_COMPILED_SHAPES + 2)))
    x = torch.randn(2, 2)
    expected = model(x)
    limits = {
        name: getattr(torch._dynamo.config, name)
        for name in ("cache_size_limit", "fail_on_cache_limit_hit", "accumulated_cache_size_limit")
    }
    with torch._dynamo.config.patch(limits):
        compile_model(model, _config())
        assert torch.equal(model(x), expected)
    torch._dynamo.reset()


def test_what_runs_again_may_not_be_inside_of_a_block() -> None:
    model = nn.Sequential(*map(Numbered, range(3)))
    with pytest.raises(TaskError, match=r"names 0\.linear, which is inside of a block"):
        compile_model(model, _config(memory={"checkpoint": ["0.linear"]}))
    with pytest.raises(TaskError, match="found no ModuleList or Sequential of blocks in Linear"):
        compile_model(nn.Linear(2, 2), _config())
