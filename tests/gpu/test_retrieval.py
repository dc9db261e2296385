"""Retrieval whose distances are computed on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import samestep
from samestep.config.evaluation import RETRIEVAL_METRICS
from tests.distributed.test_retrieval import ALL, judged, measured
from tests.gpu.test_gpu import SHARED
from tests.unit.evaluation.retrieval.test_measures import points

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.requirement("000-P1-6")
@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_a_gpu_finds_what_a_cpu_finds(distance: str) -> None:
    queries, labels = points(700, 30, 1)
    references, theirs = points(5000, 28, 2)
    arguments = (queries, labels, references, theirs)
    expected = samestep.retrieval.measure(*arguments, distance=distance)
    on_gpu = [tensor.cuda() for tensor in arguments]
    assert samestep.retrieval.measure(*on_gpu, distance=distance) == pytest.approx(expected)
    deep = {"metrics": ["mean_reciprocal_rank"], "distance": distance}
    # Few are found among one neighbour: the others are counted in passes of their own.
    assert samestep.retrieval.measure(*on_gpu, **deep) == pytest.approx(
        {"mean_reciprocal_rank": expected["mean_reciprocal_rank"]}
    )
    assert list(expected) == list(RETRIEVAL_METRICS)


def test_ranks_that_share_a_gpu_judge_a_run_alike(tmp_path: Path) -> None:
    """With deterministic algorithms, as `same: bits` has them."""
    rows = [measured(judged(tmp_path, world, SHARED, metrics=ALL)) for world in (1, 2)]
    assert rows[0] == rows[1]
    assert 0 < rows[0][-1]["precision_at_1"] <= 1
