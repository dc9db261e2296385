"""metrics.csv: the rows of metrics.jsonl as one table."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import replacing
from samestep.parsing.json_text import read_json_lines
from samestep.tracking.contract import TrackedRun, Tracker, flat_values, without_figures


class CsvTable(Tracker):
    """A line for each row, a column for each name; floats in full.

    When a name comes up for the first time, the table is made anew from metrics.jsonl, which is
    written and flushed before it. So it is after a resume, where rows were removed from there.
    """

    def __init__(self, path: Path, rows: Path) -> None:
        self._path, self._source = path, rows
        self._columns: dict[str, None] = {}
        self._rows: list[dict[str, Any]] = []

    def start(self, run: TrackedRun) -> None:
        self._columns = {}

    def write(self, row: dict[str, Any]) -> None:
        flat = flat_values(without_figures(row))
        if flat.keys() - {"step"}:
            self._rows.append(flat)

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if any(name not in self._columns for row in rows for name in row):
            self._write_anew()
        elif rows:
            self._append(rows)

    def close(self) -> None:
        self.flush()

    def _append(self, rows: Iterable[dict[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, list(self._columns)).writerows(rows)

    def _write_anew(self) -> None:
        # Twice through the file, since a long run's rows need not fit into memory.
        self._columns = {name: None for row in self._read() for name in row}
        with replacing(self._path, synced=False) as partial, partial.open("x", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(self._columns))
            writer.writeheader()
            writer.writerows(self._read())

    def _read(self) -> Iterable[dict[str, Any]]:
        return (flat_values(row) for row in read_json_lines(self._source) if row is not None)
