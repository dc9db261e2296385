"""Run directories as trackers write them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from samestep.report.curves.history import History, Series


def write_run(folder: Path, rows: Iterable[dict[str, Any]], tail: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + tail, encoding="utf-8")
    return folder


def history(label: str = "mine", **metrics: list[float]) -> History:
    found = {name: Series(range(len(values)), values) for name, values in metrics.items()}
    return History(Path(label), label, found)
