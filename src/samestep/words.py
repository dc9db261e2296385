"""Numbers with their nouns, for messages."""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: object, thing: str) -> str:
    """Return "1 rank", "2 ranks", and of several sizes "1→2 ranks"."""
    return f"{count} {thing}" if str(count) == "1" else f"{count} {thing}s"


def listed(thing: str, numbers: Sequence[object]) -> str:
    """Return "rank 1", or "ranks 1, 2"."""
    return f"{thing}{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
