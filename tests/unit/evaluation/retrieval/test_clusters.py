"""k-means of one process; tests/distributed has it on several."""

from __future__ import annotations

import pytest
import torch

from samestep.distributed.collectives import SoloCollectives
from samestep.distributed.health.activity import Activity
from samestep.evaluation.retrieval.clusters import KMeans
from samestep.evaluation.retrieval.search import QUERY_BLOCK, SharedRows
from samestep.reduce.row_shards import RowExchange, ShardPlan


def clusters(rows: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    shared = SharedRows(ShardPlan(len(rows), QUERY_BLOCK, 1), rows, torch.zeros(len(rows)).long())
    return KMeans(RowExchange(SoloCollectives(Activity())), shared, seed).clusters(count)


def test_clusters_are_those_that_no_sample_would_leave() -> None:
    rows = 1e3 * torch.randn(600, 5, generator=torch.Generator().manual_seed(0))
    found = clusters(rows, 7)
    assert found.unique().tolist() == list(range(7))
    means = torch.stack([rows[found == number].mean(0) for number in range(7)])
    assert torch.equal(torch.cdist(rows, means).argmin(1), found)
    assert torch.equal(clusters(rows, 7), found)
    assert not torch.equal(clusters(rows, 7, seed=1), found)


def test_fewer_different_rows_than_clusters() -> None:
    found = clusters(torch.tensor([[1.0, 0], [0, 1]]).repeat(20, 1), 5)
    assert len(found.unique()) == 2
    assert clusters(torch.zeros(9, 3), 4).unique().numel() == 1


def test_clusters_are_as_good_as_scikit_learns() -> None:
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    from sklearn.cluster import KMeans as Reference
    from sklearn.metrics import normalized_mutual_info_score as agreement

    rows = torch.nn.functional.normalize(torch.tensor(digits.data).float())
    theirs = Reference(10, n_init=10, random_state=0).fit(rows.numpy()).labels_
    mine = agreement(digits.target, clusters(rows, 10).numpy())
    assert mine >= agreement(digits.target, theirs) - 0.005
