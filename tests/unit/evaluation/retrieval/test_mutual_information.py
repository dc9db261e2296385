"""Against scikit-learn's."""

from __future__ import annotations

import pytest
import torch

from samestep.evaluation.retrieval.measures import adjusted_mutual_information, normalized_mutual_information

A = torch.randint(0, 9, (400,), generator=torch.Generator().manual_seed(0))
CASES = {
    "related": (A, (A + torch.arange(400) % 2) // 2),
    "unrelated": (A, torch.arange(400) % 7),
    "one part": (A, A * 0),
    "both one part": (A * 0, A * 0),
    "all alone": (A, torch.arange(400)),
    "both all alone": (torch.arange(400), torch.arange(400).flip(0)),
    "the same": (A, 20 - A),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_scikit_learn(case: str) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    left, right = CASES[case]
    expected = metrics.normalized_mutual_info_score(left, right)
    assert normalized_mutual_information(left, right) == pytest.approx(expected, abs=1e-9)
    expected = metrics.adjusted_mutual_info_score(left, right)
    assert adjusted_mutual_information(left, right) == pytest.approx(expected, abs=1e-9)
