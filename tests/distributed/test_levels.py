"""`same: rounding` and `same: samples` keep what they promise, and `bits` is more than they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.verify.differences import first_loss_difference, model_distance
from tests.distributed.running import Recorded, train
from tests.variations import variations

TASKS: dict[str, dict[str, Any]] = {
    "everything": {"clip": {"norm": 0.5}},
    "tokens with an uncalled layer": {"task": "Tokens", "distributed": {"find_unused_parameters": True}},
    "a tail that leaves ranks without samples": {"params": {"samples": 67}},
    "two optimizers and a loss with weights": {"task": "TwoOptimizers"},
    "iterable data": {"task": "Streamed", "params": {"noise": 0.0}},
}


def _assert_near(runs: list[Recorded], rtol: float) -> None:
    first = runs[0]
    for run in runs[1:]:
        assert len(set(run.record.rank_hashes)) == 1, "the ranks of one run differ"
        assert run.record.samples == first.record.samples
        assert first_loss_difference(first.record.losses, run.record.losses, rtol) is None
        assert model_distance(first.state, run.state) <= rtol


@pytest.mark.requirement("000-P0-5", "000-P2-1", "004-2.2-1", "002-C-7")
@pytest.mark.parametrize("case", variations(TASKS, kept=["everything"]))
def test_rounding_is_the_same_up_to_rounding(case: str, tmp_path: Path) -> None:
    worlds = (1, 2, 4)
    runs = [train(tmp_path, world, same="rounding", **TASKS[case]) for world in worlds]
    _assert_near(runs, rtol=1e-3)


@pytest.mark.parametrize("case", variations(TASKS, kept=["everything"]))
def test_samples_consumes_the_same_samples_in_every_step(case: str, tmp_path: Path) -> None:
    runs = [train(tmp_path, world, same="samples", **TASKS[case]) for world in (1, 2, 4)]
    for run in runs[1:]:
        assert run.record.samples == runs[0].record.samples
        assert run.record.losses != runs[0].record.losses, "draws are per rank at this level"


def test_rounding_on_one_process_has_the_bits_of_bits(tmp_path: Path) -> None:
    bits, rounding = train(tmp_path, 1), train(tmp_path, 1, same="rounding")
    assert bits.record.losses == rounding.record.losses


def test_rounding_on_four_ranks_does_not_have_the_bits(tmp_path: Path) -> None:
    """If this fails the library's all-reduce became the tree, and the faults below prove nothing."""
    bits, rounding = train(tmp_path, 4), train(tmp_path, 4, same="rounding")
    assert bits.record.state_hash != rounding.record.state_hash


def test_sync_batchnorm_is_refused_where_torch_has_none(tmp_path: Path) -> None:
    options = {"sync_batchnorm": True}
    with pytest.raises(AssertionError, match="this rank runs on the CPU, where torch has no"):
        train(tmp_path, 2, same="samples", distributed=options)
    assert train(tmp_path, 1, same="samples", distributed=options).record.steps == 6
