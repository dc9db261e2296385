"""The ranks of a run as rows of coloured lanes, each with its phase and its last heartbeat."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from samestep.cli.ui.view import ago
from samestep.report.lanes_drawing import COLORS
from samestep.report.table import Cell, html_table, marked

_LATE = 15.0
"""Seconds without a heartbeat after which a rank is late: the file comes every five."""
_LONG = 2.0
"""Seconds in one phase that are worth a word."""
_MOST_RANKS = 64
_MOST_LANES = 64


def draw_ranks(document: Mapping[str, Any], is_over: bool, now: float) -> str:
    """Return a table with a row per rank; empty if the file says nothing.

    Args:
        is_over: Whether the run has ended: then the last heartbeats say nothing.
    """
    ranks = [rank for rank in _list(document.get("ranks")) if isinstance(rank, dict)]
    if not ranks:
        return ""
    rows = [_row(rank, now)[: 3 if is_over else 6] for rank in ranks[:_MOST_RANKS]]
    more = f"<p>and {len(ranks) - _MOST_RANKS} more</p>" if len(ranks) > _MOST_RANKS else ""
    header = ["rank", "lanes", "host", "step", "phase", "heartbeat"]
    return html_table(header[: 3 if is_over else 6], rows, kind="rows") + more


def _row(rank: Mapping[str, Any], now: float) -> tuple[Any, ...]:
    lanes = [lane for lane in _list(rank.get("lanes")) if isinstance(lane, int)]
    age = max(0.0, now - _number(rank.get("beat"), now))
    beat = marked(f"{ago(age)} ago", "broken" if age > _LATE else "kept")
    seconds = _number(rank.get("seconds"), 0.0)
    phase = str(rank.get("phase", "")) + (f" for {ago(seconds)}" if seconds > _LONG else "")
    return rank.get("rank", ""), Cell(_lanes(lanes)), str(rank.get("host", "")), rank.get("step", 0), phase, beat


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) else default


def _lanes(lanes: list[int]) -> str:
    boxes = "".join(
        f'<i style="background:{COLORS[lane % len(COLORS)]}" title="lane {lane}">{lane if len(lanes) <= 16 else ""}</i>'
        for lane in lanes[:_MOST_LANES]
    )
    more = html.escape(f" and {len(lanes) - _MOST_LANES} more") if len(lanes) > _MOST_LANES else ""
    return f'<span class="lane-boxes">{boxes}</span>{more}'
