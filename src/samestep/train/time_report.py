"""Where a finished or running run's time went, from its metrics."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from samestep.errors import RunDirError

_COLUMNS = {
    "samples_per_second": min, "time_data": max, "time_compute": max, "time_exchange": max,
    "time_save": max, "rank_spread": max, "peak_memory_mb": max,
}  # fmt: skip
"""What was measured, and which of its values is the worst."""


def read_times(run: Path) -> dict[str, Any]:
    """Median and worst of what each reading measured; seconds are per step."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        reason = error.strerror or error
        raise RunDirError(f"{path} cannot be read: {reason}. Give a run's directory") from None
    rows = [row for row in map(_parse, lines) if "samples_per_second" in row]
    if not rows:
        raise RunDirError(f"{path} holds no times yet: they come with every log_every steps")
    summary: dict[str, Any] = {}
    for column, worst in _COLUMNS.items():
        values = [row[column] for row in rows if column in row]
        if values:
            summary[column] = {"median": median(values), "worst": worst(values)}
    slowest = Counter(row["slowest_rank"] for row in rows if "slowest_rank" in row)
    if slowest:
        summary["slowest_rank"] = slowest.most_common(1)[0][0]
    return summary


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:  # the last line of a run that was killed
        return {}
    return row if isinstance(row, dict) else {}
