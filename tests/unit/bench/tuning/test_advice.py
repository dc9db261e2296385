"""Which recommendation follows, from times that were made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.bench.document import Document
from samestep.bench.tuning import advice as rules
from samestep.bench.tuning import recommend
from samestep.bench.tuning.timed import Timed, is_faster, simplest_of_fast, speedup
from samestep.bench.tuning.variants import Layout
from samestep.config import load_config
from samestep.errors import OutOfMemory, PlanError, RankFailed

NOISE = (0.99, 1.0, 1.0, 1.0, 1.01)
ONE, THREADS, RANKS = Layout(1, 1), Layout(1, 4), Layout(4, 1)


def timed(
    seconds: float, noise: tuple[float, ...] = NOISE, world: int = 1, lanes: int = 8,
    batch: int = 64, peak: int | None = None,
) -> Timed:  # fmt: skip
    rounds = tuple(seconds * factor for factor in noise)
    return Timed(f"{seconds} s", world, lanes=lanes, global_batch=batch, seconds=rounds, peak_bytes=peak)


def test_a_speedup_is_that_of_a_sample() -> None:
    """Twice the samples in 1.6 times the time: 2 / 1.6."""
    found = speedup(timed(1.6, batch=128), timed(1.0, batch=64))
    assert found.median == pytest.approx(1.25)
    assert found.low < 1.25 < found.high


@pytest.mark.parametrize(
    ("fast", "noise", "expected"),
    [
        (0.9, NOISE, True),  # 1.11 times as fast
        (0.97, NOISE, False),  # 1.03 times: not worth it
        (0.9, (0.7, 0.9, 1.0, 1.1, 1.3), False),  # noise
        (0.9, (1.0, 1.0), True),  # too few rounds for a test, but the slowest is faster than the fastest
        (0.9, (0.8, 1.2), False),
    ],
)
def test_faster_is_worth_it_and_no_noise(fast: float, noise: tuple[float, ...], expected: bool) -> None:
    assert is_faster(timed(fast, noise), timed(1.0, noise)) is expected


def test_the_simplest_of_what_is_about_as_fast_is_chosen() -> None:
    slow, simple, best = timed(2.0), timed(1.02), timed(1.0)
    assert simplest_of_fast([slow, simple, best]) is simple
    failed = Timed("x", failed="why")
    assert simplest_of_fast([failed, slow, best]) is best


def test_threads_are_recommended_if_ranks_are_no_faster() -> None:
    tried = [(ONE, timed(1.0)), (THREADS, timed(0.4)), (RANKS, timed(0.39, world=4))]
    layout, found = rules.advise_layout(tried, "auto", "bits")
    assert layout == THREADS
    assert found.overrides == {"distributed.threads_per_rank": 4}
    assert found.another_run, "threads change the last bits, and auto is one thread"
    assert "2.500 x" in found.text
    assert "1 rank x 1 thread" in found.text


def test_ranks_are_recommended_with_the_command_that_starts_them() -> None:
    tried = [(ONE, timed(1.0)), (THREADS, timed(0.6)), (RANKS, timed(0.3, world=4))]
    layout, found = rules.advise_layout(tried, "auto", "bits")
    assert layout == RANKS
    assert found.overrides == {}, "auto is one thread for bits"
    assert "samestep launch CONFIG --nproc 4" in found.text
    _, configured = rules.advise_layout(tried, 4, "rounding")
    assert configured.overrides == {"distributed.threads_per_rank": 1}
    assert not configured.another_run


def test_what_cannot_be_measured_at_all_is_an_error() -> None:
    with pytest.raises(PlanError, match="no step could be measured: why"):
        rules.advise_layout([(ONE, Timed("x", failed="why"))], "auto", "bits")


def test_lanes_follow_the_rule_of_their_own_command() -> None:
    """The most whose steps take at most 1.1 times the fastest: 4, and not 8."""
    found = [timed(1.0, lanes=1), timed(1.05, lanes=4), timed(1.4, lanes=8)]
    advice = rules.advise_lanes(found, 8)
    assert advice.overrides == {"lanes": 4}
    assert advice.another_run
    assert rules.advise_lanes(found, 4).overrides == {}
    fixed = rules.advise_lanes([], 8, "batchnorm is global")
    assert not fixed.measurable
    assert fixed.text == "not measurable here: batchnorm is global"


def test_the_fewest_workers_that_are_fast_enough() -> None:
    slow_data = {0: timed(1.0), 1: timed(0.6), 2: timed(0.5), 4: timed(0.49)}
    advice = rules.advise_workers(slow_data, 0)
    assert advice.overrides == {"loader.workers": 2}
    assert "2.000 x" in advice.text
    assert "bottleneck" in advice.text
    none = rules.advise_workers({0: timed(1.0), 1: timed(1.0)}, 1)
    assert none.overrides == {"loader.workers": 0}
    assert "not faster" in none.text


def test_another_precision_must_be_faster() -> None:
    advice = rules.advise_precision(timed(1.0), timed(0.5), "fp32", "bf16")
    assert advice.overrides == {"precision": "bf16"}
    assert advice.another_run
    slower = rules.advise_precision(timed(1.0), timed(2.0), "fp32", "bf16")
    assert slower.overrides == {}
    assert "bf16 is 0.500 x" in slower.text
    failed = rules.advise_precision(timed(1.0), Timed("bf16", failed="no such unit"), "fp32", "bf16")
    assert "no such unit" in failed.text
    assert not failed.measurable


def test_graphs_are_measured_on_gpus_only() -> None:
    assert not rules.advise_graph(timed(1.0), None, "they need a GPU").measurable
    assert rules.advise_graph(timed(1.0), timed(2.0), "").overrides == {}
    assert rules.advise_graph(timed(1.0), timed(0.5), "").overrides == {"speed.graph": False}


def test_a_larger_batch_is_told_and_never_set() -> None:
    """64 samples in 1 s, 128 in 1.6 s: 1.25 times as many in a second."""
    found = [timed(1.0, peak=100), timed(1.6, batch=128, peak=164)]
    advice = rules.advise_batch(found, 1000)
    assert "128 has 1.250 x" in advice.text
    assert "choose it yourself" in advice.text
    assert advice.overrides == {}
    full = rules.advise_batch([timed(1.0), Timed("global batch 128", failed="out of memory")], None)
    assert "global batch 128 does not fit: out of memory" in full.text


def test_the_largest_batch_follows_from_a_line() -> None:
    """A byte a sample from 100 bytes at 64 on; 900 of 1000 bytes are usable: 64 + 800."""
    found = [timed(1.0, peak=100), timed(1.0, batch=128, peak=164)]
    assert rules.largest_batch(found, 1000) == 864
    assert rules.largest_batch(found, None) is None
    assert rules.largest_batch(found[:1], 1000) is None
    assert rules.largest_batch([found[0], timed(1.0, batch=128, peak=100)], 1000) is None


@pytest.mark.parametrize(("fits", "own"), [("optimizer", "none"), ("weights", "none"), ("weights", "optimizer")])
def test_the_first_sharding_that_fits_is_taken(fits: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def measured(request: recommend.TuneRequest, way: Layout, tried: Any) -> Document:
        shard = request.config.distributed.shard
        asked.append((shard, way.ranks))
        if shard != fits or way.ranks == 1:
            if way.ranks > 1:
                raise RankFailed(f"rank 1:\ncuda:1 {OutOfMemory.WORDS} in step 0")
            return Document("tune", {}, [{"label": "x", "world": 1, "failed": "too little"}])
        row = {"label": "x", "world": way.ranks, "threads": 1, "lanes": 8, "global_batch": 64}
        return Document("tune", {}, [{**row, "seconds": [1.0], "peak_bytes": 1, "notes": []}])

    monkeypatch.setattr(recommend, "_on_layout", measured)
    config = load_config({"task": "t.py:T", "epochs": 1, "global_batch": 64, "distributed": {"shard": own}})
    request = recommend.TuneRequest(config, Path("x.yaml"))
    ways = [Layout(1, None), Layout(4, None)]
    found, tried, unfit = recommend._first_that_fits(request, ways, lambda line: None)
    assert found.config.distributed.shard == fits
    assert found.overrides == (f"distributed.shard={fits}",)
    assert asked[0] == (own, 1), "as configured, on all layouts"
    assert asked[-1] == (fits, 4), "one rank has nobody to share with"
    assert not tried[-1][1].failed
    assert all(OutOfMemory.WORDS in why for why in unfit.values())
    advice = rules.advise_shard(fits, unfit, 3 << 30, 80 << 30)
    assert advice.overrides == {"distributed.shard": fits}
    assert not advice.another_run
    assert f"{own} does not fit: cuda:1" in advice.text


def test_other_failures_of_ranks_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*args: Any) -> Document:
        raise RankFailed("rank 0: no such file")

    monkeypatch.setattr(recommend, "_on_layout", measured)
    config = load_config({"task": "t.py:T", "epochs": 1, "global_batch": 64})
    with pytest.raises(RankFailed, match="no such file"):
        recommend._first_that_fits(recommend.TuneRequest(config, Path("x")), [Layout(2, 1)], lambda line: None)


def test_a_step_that_fits_needs_no_sharding() -> None:
    advice = rules.advise_shard("none", {}, 3 << 30, 80 << 30)
    assert not advice.overrides
    assert advice.text == "none: a rank holds 3 GB of 80 GB"
