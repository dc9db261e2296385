"""Summarizes the times of a finished or running run, from its metrics."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from samestep.errors import RunDirError, TextError
from samestep.parsing.files import is_file
from samestep.parsing.json_text import read_json_lines

_COLUMNS = {
    "samples_per_second": min, "time_data": max, "time_compute": max, "time_exchange": max,
    "time_save": max, "rank_spread": max, "peak_memory_mb": max,
}  # fmt: skip
"""What was measured, and which of its values is the worst."""


def read_times(run: Path) -> dict[str, Any]:
    """Return the median and the worst of each measured value, per step; empty before the first.

    Raises:
        RunDirError: if the file of metrics cannot be read.
    """
    path = run / "metrics.jsonl"
    if not is_file(path):
        return {}
    try:
        # The last line of a run that was killed is none.
        rows = [row for row in read_json_lines(path) if row and "samples_per_second" in row]
    except TextError as error:
        raise RunDirError(f"{path} {error}. Give a run's directory") from None
    summary: dict[str, Any] = {}
    for column, worst in _COLUMNS.items():
        values = [row[column] for row in rows if isinstance(row.get(column), (int, float))]
        if values:
            summary[column] = {"median": median(values), "worst": worst(values)}
    slowest = Counter(row["slowest_rank"] for row in rows if isinstance(row.get("slowest_rank"), int))
    if slowest:
        summary["slowest_rank"] = slowest.most_common(1)[0][0]
    return summary
