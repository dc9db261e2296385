"""Results by hand, as the commands of `samestep bench` write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.bench.document import Document
from samestep.bench.report.results import Machine, Result
from samestep.bench.statistics import spread_of

MACHINE = {
    "device": "cpu", "hosts": ["node1"], "cpus": 16, "system": "Linux x86_64", "python": "3.12.3",
    "torch": "2.11.0", "samestep": "0.1.0", "config": "built-in", "task": "mlp-small",
}  # fmt: skip
NOISE = (0.99, 1.0, 1.0, 1.0, 1.01)
"""Of rounds around their median; spread_of has all of them as the range."""


def figure(median: float, low: float | None = None, high: float | None = None) -> dict[str, float]:
    """A median with its range."""
    return {
        "median": median,
        "low": 0.99 * median if low is None else low,
        "high": 1.01 * median if high is None else high,
    }


def timed(seconds: float, noise: Sequence[float] = NOISE) -> dict[str, Any]:
    """The fields of every timed figure."""
    rounds = [seconds * factor for factor in noise]
    found = spread_of(rounds)
    return {"seconds": rounds, "median": found.median, "low": found.low, "high": found.high}


def scaling(world: int, seconds: float, **other: Any) -> dict[str, Any]:
    """A row of `bench scaling`: ours, strong, over gloo, and without an efficiency."""
    row: dict[str, Any] = {
        "mode": "strong", "workload": "mlp-small", "variant": "samestep", "precision": "fp32",
        "world": world, "backend": "gloo", "lanes": 8, "global_batch": 64, **timed(seconds),
        "efficiency": None, "ratio_to_ddp": None, "phases": None, "control": None,
        "ranks": [{"rank": rank, "host": "node1", "compute": 0.01, "memory_bytes": 1 << 28} for rank in range(world)],
    }  # fmt: skip
    row |= other
    return {**row, "samples_per_second": row["global_batch"] / row["median"]}


def comm(operation: str, world: int, size: int, seconds: float) -> dict[str, Any]:
    """A row of `bench comm`."""
    row = {"operation": operation, "world": world, "backend": "gloo", "bytes": size}
    return {**row, **timed(seconds), "bus_bytes": size / seconds}


def memory(part: str, measured: int, world: int = 1) -> dict[str, Any]:
    """A row of `bench memory`."""
    row = {"part": part, "world": world, "backend": "gloo", "lanes_per_rank": 8}
    return {**row, "measured_bytes": measured, "low": measured - 1000, "high": measured + 1000}


def leak(slope: float, low: float, high: float, leaks: bool, rank: int = 0) -> dict[str, Any]:
    """A leak test of `bench memory`."""
    found = {
        "steps": 2000, "slope_bytes_per_step": slope, "low": low, "high": high, "leaks": leaks,
        "rank": rank, "host": "node1", "memory": "host",
    }  # fmt: skip
    return {"leak": found, "world": 1, "backend": "gloo"}


def document(kind: str, rows: Sequence[dict[str, Any]], **facts: Any) -> Document:
    """A result of one machine."""
    return Document(kind, {**MACHINE, **facts}, rows)


def machine(kind: str, rows: Sequence[dict[str, Any]], label: str = "", **facts: Any) -> Machine:
    """A machine with one result."""
    return Machine(label, [Result(Path(f"{kind}.json"), document(kind, rows, **facts))])
