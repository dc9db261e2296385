"""Rows of `samestep bench scaling` with known times."""

from __future__ import annotations

from typing import Any


def row_of(mode: str, world: int, median: float, spread: float = 0.0, variant: str = "samestep") -> dict[str, Any]:
    return {
        "mode": mode, "workload": "mlp-small", "variant": variant, "precision": "fp32", "world": world,
        "backend": "gloo", "lanes": world if mode == "weak" else 8, "global_batch": 8 * world if mode == "weak" else 8,
        "seconds": [median - spread, median, median + spread], "median": median,
        "low": median - spread, "high": median + spread, "samples_per_second": 8 * (world if mode == "weak" else 1) / median,
        "efficiency": None, "ratio_to_ddp": None, "phases": None, "ranks": [], "slow_ranks": [],
        "control": {"median": 1.0, "low": 0.99, "high": 1.01}, "left_out": {},
        "shares_cores": False,
    }  # fmt: skip
