"""Whole numbers from text."""

from __future__ import annotations

import re

_WHOLE = re.compile(r"[0-9]{1,18}")


def whole_number(text: str) -> int | None:
    """Return the number that plain digits are; None for anything else, and beyond 18 digits.

    `str.isdigit` takes `²`, which `int` refuses; `int` takes `1_0`, ` 1` and the digits of every
    script, and refuses 5,000 of them.
    """
    return int(text) if _WHOLE.fullmatch(text) else None


def signed_number(text: str) -> int | None:
    """Return the same with a minus before it, and space around it: a wrong number can be named as one."""
    stripped = text.strip()
    number = whole_number(stripped.removeprefix("-"))
    return number if number is None or not stripped.startswith("-") else -number
