"""Figures as a person says them. No torch here."""

from __future__ import annotations


def format_bytes(size: float) -> str:
    """Bytes."""
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if abs(size) >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"
