"""On a GPU: the form of a named optimizer, and a step with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samestep.config.optim import OptimizerConfig
from samestep.optim.optimizers import build_optimizers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("adamw", {"fused": True, "capturable": False}),
        ("sgd", {"fused": True}),
        ("rmsprop", {"foreach": True, "capturable": True}),
        ("nadam", {"foreach": True, "capturable": True}),
        ("adagrad", {}),
        ("adafactor", {"foreach": True}),
    ],
)
def test_the_form_that_is_chosen_steps(name: str, flags: dict[str, bool]) -> None:
    model, device = nn.Linear(3, 2, bias=False), torch.device("cuda")
    (optimizer,) = build_optimizers(OptimizerConfig(name=name), [model], device)
    assert {flag: optimizer.defaults[flag] for flag in flags} == flags
    before = model.weight.detach().clone()
    assert before.is_cuda
    model(torch.ones(4, 3, device=device)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
