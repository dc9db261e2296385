"""Checks rows of results before anything is computed from them, and tells which of them measure the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.bench.statistics import Spread
from samestep.errors import TextError
from samestep.parsing.limits import short
from samestep.report.format import format_bytes

Row = Mapping[str, Any]

_IDENTITY = (
    "mode", "workload", "contestant", "precision", "world", "backend", "lanes", "global_batch", "operation", "bytes",
    "part", "lanes_per_rank", "action", "workers", "prefetch",
)  # fmt: skip
"""Fields that say what was measured; the others say what came out."""
_SPREAD = ("median", "low", "high")


def identity(kind: str, row: Row) -> tuple[object, ...]:
    """Return what a row measured: equal for two measurements of the same."""
    leak = row.get("leak") or {}
    whose = ("leak" in row, leak.get("rank"), leak.get("memory"))
    return (kind, *whose, *(row.get(name) for name in _IDENTITY))


def describe(kind: str, row: Row) -> str:
    """Return what a row measured, in words."""
    named = [str(row[name]) for name in ("mode", "workload", "contestant", "precision", "operation", "action", "part") if row.get(name) is not None]  # fmt: skip
    if kind == "comm":
        named.append(format_bytes(row["bytes"]))
    counted = [f"{row[n]} {n.replace('_', ' ')}" for n in ("workers", "prefetch", "lanes_per_rank") if row.get(n) is not None]  # fmt: skip
    world = "1 rank" if row["world"] == 1 else f"{row['world']} ranks"
    backend = [str(row["backend"])] if row.get("backend") else []
    return f"{kind}: {', '.join([*named, *counted, world, *backend])}"


def spread(row: Row) -> Spread:
    """Return a figure with its range."""
    return Spread(*(float(row[name]) for name in _SPREAD))


def is_number(value: object) -> bool:
    """Return whether it is one, and finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_rows(file: Path, kind: str, rows: object) -> None:
    """Refuse rows that a report could not be made of.

    Raises:
        TextError: with the first field that is missing, or holds something else.
    """
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        wrong = _wrong(kind, row)
        if wrong:
            raise TextError(f"{file}: row {number} of kind {short(repr(kind))} {wrong}")


def _wrong(kind: str, row: object) -> str:
    if not isinstance(row, dict):
        return "holds no fields"
    if not (isinstance(row.get("world"), int) and row["world"] >= 1):
        return f"has world {short(repr(row.get('world')))}: a number of ranks is needed"
    needed = _LEAK if "leak" in row else _NEEDED.get(kind, {})
    for name, is_right in needed.items():
        if not is_right(row.get(name)):
            return f"has {name} {short(repr(row.get(name)))}, which a report cannot be made of"
    rounds = row.get("seconds")
    if rounds is not None and not _is_rounds(rounds):
        return "has seconds that are no list of times"
    return ""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_mode(value: object) -> bool:
    return value in ("weak", "strong")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_time(value: object) -> bool:
    return is_number(value) and isinstance(value, (int, float)) and value > 0


def _is_rounds(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_time, value))


def _is_size(value: object) -> bool:
    """Or none, where a part cannot be told from the others."""
    return value is None or is_number(value)


def _is_spread(value: object) -> bool:
    return isinstance(value, dict) and all(is_number(value.get(name)) for name in _SPREAD)


def _is_spread_or_none(value: object) -> bool:
    return value is None or _is_spread(value)


def _are_phases(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(map(_is_spread, value.values())))


def _is_leak(value: object) -> bool:
    figures = ("slope_bytes_per_step", "low", "high", "steps")
    return (
        isinstance(value, dict)
        and isinstance(value.get("leaks"), bool)
        and isinstance(value.get("rank"), int)
        and isinstance(value.get("host"), str)
        and all(is_number(value.get(name)) for name in figures)
    )


_LEAK: Mapping[str, Callable[[object], bool]] = {"leak": _is_leak}
_TIMED: Mapping[str, Callable[[object], bool]] = {name: _is_time for name in _SPREAD}
_NEEDED: Mapping[str, Mapping[str, Callable[[object], bool]]] = {
    "scaling": {
        "mode": _is_mode,
        **{name: _is_text for name in ("workload", "contestant", "precision", "backend")},
        **_TIMED,
        "global_batch": _is_count,
        "efficiency": _is_spread_or_none,
        "ratio_to_ddp": _is_spread_or_none,
        "phases": _are_phases,
    },
    "memory": {"part": _is_text, **{name: _is_size for name in ("predicted_bytes", "measured_bytes", "low", "high")}},
    "checkpoint": {"action": _is_text, "bytes": _is_count, **_TIMED},
    "loader": {"workers": _is_count, "prefetch": _is_count, **_TIMED},
    "comm": {"operation": _is_text, "bytes": _is_count, "bus_bytes": is_number, **_TIMED},
}
