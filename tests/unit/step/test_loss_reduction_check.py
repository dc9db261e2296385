"""A mean that is given as a sum is found, and a sum that is given as a mean, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.step.loss_terms import OneLoss, ReductionCheckedTerms, is_mean, warning_about

N = 8
LABELS = torch.arange(N) % 3
Z = torch.rand(N, 3, generator=torch.Generator().manual_seed(1))
Form = Callable[[Tensor], Tensor]


def outputs() -> Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))
    return net(torch.randn(N, 4))  # type: ignore[no-any-return]


def _in_bf16(out: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(out @ torch.eye(3), LABELS).float()


MEANS: dict[str, Form] = {
    "cross entropy": lambda o: F.cross_entropy(o, LABELS),
    "with label smoothing": lambda o: F.cross_entropy(o, LABELS, label_smoothing=0.1),
    "of probabilities": lambda o: F.cross_entropy(o, Z),
    "of pixels": lambda o: F.cross_entropy(o[:, :, None, None], LABELS[:, None, None]),
    "squares": lambda o: F.mse_loss(o, Z),
    "absolute": lambda o: F.l1_loss(o, Z),
    "huber": lambda o: F.huber_loss(o, Z),
    "logits": lambda o: F.binary_cross_entropy_with_logits(o, Z),
    "batchmean": lambda o: F.kl_div(o.log_softmax(1), Z, reduction="batchmean"),
    "by hand": lambda o: ((o - Z) ** 2).sum() / N,
    "by a tensor": lambda o: ((o - Z) ** 2).sum() / torch.tensor(float(N)),
    "method": lambda o: (o - Z).abs().mean(),
    "two of them": lambda o: F.mse_loss(o, Z) + 0.1 * F.l1_loss(o, Z),
    "accumulated": lambda o: F.mse_loss(o, Z) / 4,
    "negative": lambda o: -(o * Z).mean(),
    "in bf16": _in_bf16,
}
SUMS: dict[str, Form] = {
    "cross entropy": lambda o: F.cross_entropy(o, LABELS, reduction="sum"),
    "with label smoothing": lambda o: F.cross_entropy(o, LABELS, label_smoothing=0.1, reduction="sum"),
    "of probabilities": lambda o: F.cross_entropy(o, Z, reduction="sum"),
    "squares": lambda o: F.mse_loss(o, Z, reduction="sum"),
    "mean made a sum": lambda o: F.mse_loss(o, Z) * N,
    "mean made a sum by a tensor": lambda o: F.mse_loss(o, Z) * torch.tensor(float(N)),
    "means of samples, summed": lambda o: ((o - Z) ** 2).mean(1).sum(),
    "half of squares": lambda o: ((o - Z) ** 2).sum() / 2,
    "a variance": lambda o: ((o - Z) ** 2).sum() / (2 * 0.3**2),
    "a sum and a mean": lambda o: F.mse_loss(o, Z, reduction="sum") + o.mean(),
    "a mean inside": lambda o: (o - o.mean()).pow(2).sum(),
}


@pytest.mark.parametrize("form", MEANS)
def test_means_are_found(form: str) -> None:
    assert is_mean(MEANS[form](outputs()), N)
    assert "a sum over 8, but it is a mean already" in warning_about((MEANS[form](outputs()), N), N)


@pytest.mark.parametrize("form", SUMS)
def test_sums_are_left_alone(form: str) -> None:
    assert not is_mean(SUMS[form](outputs()), N)
    assert not warning_about((SUMS[form](outputs()), N), N)


def test_the_half_of_two_squares_is_no_mean() -> None:
    assert not is_mean((outputs()[:2] ** 2).sum() / 2, 2)
    assert is_mean((outputs()[:2] ** 2).mean(), 2)


@pytest.mark.parametrize("count", [1, 1.0, torch.tensor(1), 0])
def test_a_count_of_one_is_no_mistake(count: Any) -> None:
    assert not warning_about((outputs().mean(), count), N)


def test_a_mean_without_a_count_and_counts_as_tensors() -> None:
    assert not warning_about(outputs().mean(), N)
    assert warning_about((outputs().mean(), torch.tensor(N)), N)


def test_losses_with_names_are_named() -> None:
    out = outputs()
    found = warning_about({"recon": ((out**2).sum(), N), "kl": (out.mean(), N)}, N)
    assert found.startswith("loss kl was given as a sum over 8")


def test_only_the_first_loss_is_looked_at() -> None:
    lines: list[str] = []
    terms = ReductionCheckedTerms(OneLoss(), lines.append)
    for _ in range(3):
        loss, count = terms.combine((outputs().mean(), N), N)
    assert len(lines) == 1
    assert (count, loss.dim()) == (N, 0)


PLAIN_SUMS = ["cross entropy", "squares", "means of samples, summed"]


@pytest.mark.parametrize("form", PLAIN_SUMS)
def test_a_sum_that_is_given_as_a_mean_is_found(form: str) -> None:
    assert "but it is a sum" in warning_about(SUMS[form](outputs()), N)
    assert not warning_about(SUMS[form](outputs()), 1)


@pytest.mark.parametrize("form", MEANS)
def test_a_mean_is_not_taken_for_a_sum(form: str) -> None:
    assert not warning_about(MEANS[form](outputs()), N)
