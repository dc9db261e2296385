"""Everything that was measured as CSV: for spreadsheets and other programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.bench.report.report import Report
from samestep.checkpoint.files import refuse_existing, write_whole
from samestep.errors import OutputError

_TARGETS = "targets"


def csv_files(report: Report, path: Path) -> dict[Path, str]:
    """Return what is written where: one file of all rows, or in a folder one for each kind and the targets.

    Args:
        path: A file if its name ends in `.csv`; else a folder.
    """
    kinds = _rows_by_kind(report)
    if path.suffix.lower() == ".csv":
        return {path: _text([{"kind": kind, **row} for kind, rows in kinds.items() for row in rows])}
    targets = [target.as_json() for target in report.targets]
    found = {path / f"{kind}.csv": _text(rows) for kind, rows in kinds.items()}
    return {**found, path / f"{_TARGETS}.csv": _text(list(map(flat, targets)))}


def refuse_csv(path: Path, force: bool) -> None:
    """Refuse what is there already; before the work of a command."""
    if force:
        return
    if path.suffix.lower() == ".csv":
        refuse_existing(path)
    elif path.is_dir():
        refuse_existing(*(file for file in sorted(path.glob("*.csv"))))
    elif path.exists():
        raise OutputError(f"{path} is a file, and its name does not end in .csv: name a folder")


def write_csv(report: Report, path: Path) -> None:
    """Write the files; see `csv_files`.

    Raises:
        OutputError: one cannot be written.
    """
    for file, text in csv_files(report, path).items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
        except OSError as error:
            raise OutputError(f"{file} cannot be written: {error.strerror or error}") from None


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures as `efficiency.median`; lists of numbers with spaces between them."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            plain = not any(isinstance(one, (dict, list)) for one in value)
            found[prefix + name] = " ".join(map(str, value)) if plain else json.dumps(value)
        else:
            found[prefix + name] = value
    return found


def _rows_by_kind(report: Report) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for machine in report.machines:
        facts = {"machine": machine.label or " ".join(machine.facts["hosts"])}
        for kind in machine.kinds():
            rows = found.setdefault(kind, [])
            rows += [{**facts, **flat(row)} for row in machine.rows(kind)]
    return found


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
