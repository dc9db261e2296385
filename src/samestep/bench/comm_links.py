"""Lines through the times of messages. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samestep.bench.statistics import Link, fit_link


def links_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], Link | None]:
    """For each operation and number of ranks, the line through its times.

    Args:
        rows: Of a document of `samestep bench comm`.
    """
    kinds: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["operation"], row["world"]), []).append(row)
    return {
        kind: fit_link([row["bytes"] for row in found], [row["median"] for row in found])
        for kind, found in kinds.items()
    }
