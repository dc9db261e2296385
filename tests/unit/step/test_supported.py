"""What lanes cannot train is refused before the first step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from samestep.errors import TaskError
from samestep.step.run_objects import refuse_unsupported
from tests.unit.step.engines import Steps, output_sum

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_everything_is_named_at_once() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.SyncBatchNorm(2))
    with pytest.raises(TaskError) as caught:
        Steps(model, objects=[model, LBFGS(model.parameters())])
    message = str(caught.value)
    assert "0 is an Embedding with sparse=True" in message
    assert "1 is a SyncBatchNorm, which normalises over ranks" in message
    assert "LBFGS evaluates the loss several times" in message


@pytest.mark.parametrize(("same", "device"), [("rounding", GPU), ("samples", GPU)])
def test_syncbatchnorm_is_for_gpus_without_same_bits(same: str, device: torch.device) -> None:
    refuse_unsupported([nn.SyncBatchNorm(2)], [], same, device)
    with pytest.raises(TaskError, match="does not run on cpu"):
        refuse_unsupported([nn.SyncBatchNorm(2)], [], same, CPU)
    with pytest.raises(TaskError, match="normalises over ranks"):
        refuse_unsupported([nn.SyncBatchNorm(2)], [], "bits", device)


def test_a_sparse_gradient_of_a_function_is_refused_by_name() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x.long().clamp(0, 3), self.table, sparse=True)

    model = Looked()
    with pytest.raises(TaskError, match="parameter table got a sparse gradient"):
        Steps(model, objects=[model, SGD(model.parameters(), lr=0.1)]).first().train(output_sum(model))
