"""The promise: the same bits at any world size, for everything that could break them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.running import EACH_EPOCH, assert_same, train
from tests.variations import variations

CASES: dict[str, dict[str, Any]] = {
    "batchnorm, dropout, augmentation, tail, clipping, adam": {"clip": {"norm": 0.5}, "evaluation": EACH_EPOCH},
    "momentum": {"params": {"optimizer": "momentum"}},
    "six lanes": {"global_batch": 30, "lanes": 6},
    "a tail that leaves ranks without samples": {"params": {"samples": 67}},
    "drop_last": {"drop_last": True},
    "bf16": {"precision": "bf16"},
    "tied, frozen and uncalled parameters, variable token counts": {"task": "Tokens"},
    "two optimizers and a loss with weights": {"task": "TwoOptimizers"},
    "parameters used in some lanes only": {"task": "Sometimes", "distributed": {"find_unused_parameters": True}},
    "class-balanced order": {"task": "Balanced"},
    "iterable data": {"task": "Streamed"},
    "iterable data of known length": {"task": "Streamed", "steps_per_epoch": 2},
    "iterable data without its tail": {"task": "Streamed", "drop_last": True},
    "hugging face iterable data": {"task": "HuggingFace"},
}

IN_CI = (
    "batchnorm, dropout, augmentation, tail, clipping, adam",
    "tied, frozen and uncalled parameters, variable token counts",
    "parameters used in some lanes only",
    "iterable data",
)


@pytest.mark.requirement(
    "000-V-1", "002-C-4", "002-C-8", "002-K-5", "004-5.2-4", "004-SM-3", "004-KR-2", "000-G-4", "002-C-7", "000-X-1"
)
@pytest.mark.parametrize("case", variations(CASES, kept=IN_CI))
def test_one_two_and_four_ranks_are_one_run(case: str, tmp_path: Path) -> None:
    assert_same([train(tmp_path, world, **CASES[case]) for world in (1, 2, 4)])


@pytest.mark.requirement("002-C-6")
def test_any_number_of_ranks_up_to_the_lanes(tmp_path: Path) -> None:
    assert_same([train(tmp_path, world, clip={"norm": 0.5}) for world in (1, 3, 5, 8)])


def test_three_ranks_of_a_token_model(tmp_path: Path) -> None:
    assert_same([train(tmp_path, world, task="Tokens") for world in (1, 3)])


def test_uneven_lane_weights(tmp_path: Path) -> None:
    even = train(tmp_path, 1)
    two = train(tmp_path, 2, distributed={"lane_weights": [3, 1]})
    four = train(tmp_path, 4, distributed={"lane_weights": [1, 3, 2, 2]})
    assert_same([even, two, four])


def test_loader_workers_and_prefetch_change_nothing(tmp_path: Path) -> None:
    none = train(tmp_path, 1)
    two = train(tmp_path, 1, loader={"workers": 2, "prefetch": 3})
    ranks = train(tmp_path, 2, loader={"workers": 2})
    assert_same([none, two, ranks])


@pytest.mark.variation("test_loader_workers_and_prefetch_change_nothing: of iterable data")
def test_loader_workers_change_nothing_in_streams(tmp_path: Path) -> None:
    none = train(tmp_path, 1, task="Streamed")
    two = train(tmp_path, 2, task="Streamed", loader={"workers": 3})
    assert_same([none, two])


@pytest.mark.requirement("004-2.2-4", "004-KR-3")
def test_evaluation_on_rank_0_gives_the_same_bits(tmp_path: Path) -> None:
    sharded = train(tmp_path, 4, evaluation=EACH_EPOCH)
    alone = train(tmp_path, 4, evaluation="rank0")
    assert_same([sharded, alone])


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    one, other = train(tmp_path, 1, seed=1), train(tmp_path, 1, seed=2)
    assert one.record.state_hash != other.record.state_hash
    assert one.record.samples != other.record.samples


def test_other_lanes_are_another_run_with_the_same_samples(tmp_path: Path) -> None:
    eight, four = train(tmp_path, 1), train(tmp_path, 1, lanes=4)
    assert eight.record.state_hash != four.record.state_hash
    assert eight.record.samples == four.record.samples
