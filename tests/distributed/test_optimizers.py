"""Optimizers and schedules by name: the same run at any size, and after a stop at another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import Recorded, assert_same, losses_of, rows_of, train
from tests.variations import variations

OPTIMIZER: dict[str, Any] = {
    "name": "adamw",
    "lr": 0.01,
    "weight_decay": 0.1,
    "groups": [
        {"match": ["last.*"], "lr": 0.02},
        {"match": ["extra.0.*"], "name": "sgd", "lr": 0.05, "args": {"momentum": 0.9}},
    ],
}
CASES: dict[str, dict[str, Any]] = {
    "warm-up and cosine": {"schedule": {"name": "cosine", "warmup": 3, "final": 0.1}},
    "warm-up and plateau": {
        "schedule": {"name": "plateau", "warmup": 5, "args": {"patience": 0, "factor": 0.5}},
        "best": {"metric": "f1", "mode": "max"},
        "evaluation": {"every_steps": 1},
    },
    "warm-up in steps, decay by epochs, scaled rates": {
        "schedule": {"name": "step", "warmup": 4, "args": {"step_size": 1, "gamma": 0.5}},
        "lr_scaling": "linear",
        "base_batch": 16,
    },
}


def _values(case: str) -> dict[str, Any]:
    return {"task": "Named", "optimizer": OPTIMIZER, "epochs": 3, **CASES[case]}


def _rates(run: Recorded) -> list[Any]:
    """Of each step: the rate of the only group, or those of all groups."""
    return [row["lr"] for row in rows_of(run.folder) if "lr" in row]


@pytest.mark.parametrize("case", variations(CASES, kept=["warm-up in steps, decay by epochs, scaled rates"]))
def test_the_same_run_at_any_size_and_after_stops(case: str, tmp_path: Path) -> None:
    """Stopped in the middle of the warm-up on 4 ranks, after it on 1, ended on 2."""
    values = _values(case)
    runs = [train(tmp_path, world, **values) for world in (1, 2, 4)]
    assert_same(runs)
    folder = tmp_path / "run"
    go_on(folder, 4, at=1, rank=3, how="SIGTERM", **values)
    go_on(folder, 1, at=6, how="SIGTERM", **values)
    ended = finish(folder, 2, **values)
    assert ended.record.start == 7
    assert ended.record.state_hash == runs[0].record.state_hash
    assert losses_of(folder) == runs[0].record.losses
    assert _rates(ended) == _rates(runs[0])
    # With and without decay: of most weights, and of the last layer's; then the loss's own.
    full = [0.01, 0.01, 0.02, 0.02, 0.05]
    scale = 2 if "lr_scaling" in values else 1
    warmup = values["schedule"]["warmup"]
    for step, share in enumerate(_shares(case, runs[0])):
        rise = min(1.0, (step + 1) / (warmup + 1))
        expected = [scale * rise * share * rate for rate in full]
        assert _rates(runs[0])[step] == pytest.approx(expected)


def _shares(case: str, run: Recorded) -> list[float]:
    """What the schedule alone makes of the rates, in each of the nine steps."""
    if case.endswith("cosine"):
        past = [max(0, step - 3) / 6 for step in range(9)]
        return [0.1 + 0.9 * (1 + math.cos(math.pi * gone)) / 2 for gone in past]
    if "decay by epochs" in case:
        return [0.5 ** (step // 3) for step in range(9)]
    shares, best = [1.0], -1.0
    for row in rows_of(run.folder):
        if "f1" in row:
            better = row["f1"] > best * (1 + 1e-4)
            best = row["f1"] if better else best
            shares.append(shares[-1] * (1 if better else 0.5))
    assert len(set(shares)) > 2, "the plateau must have been met"
    return shares[:9]


def test_the_run_tells_what_was_chosen_and_scaled(tmp_path: Path) -> None:
    values = _values("warm-up in steps, decay by epochs, scaled rates")
    log = (train(tmp_path, 1, **values).folder / "logs" / "rank-0.log").read_text()
    assert "Optimizers: AdamW (fused) of 8 tensor(s) in 4 group(s); SGD (fused) of 1 tensor(s)" in log
    assert "Learning rates are multiplied by 2 (lr_scaling linear: global batch 32" in log
    assert "Schedule: step, moving on with every epoch, after 4 steps of warm-up" in log


def test_a_tasks_own_rates_are_scaled_before_its_schedules(tmp_path: Path) -> None:
    plain = train(tmp_path, 1, "Everything", base_batch=8)
    scaled = train(tmp_path, 1, "Everything", base_batch=8, lr_scaling="sqrt")
    told = (plain.folder / "logs" / "rank-0.log").read_text()
    assert "lr_scaling sqrt would multiply them by 2, linear by 4" in told
    assert _rates(scaled) == pytest.approx([2 * rate for rate in _rates(plain)])
