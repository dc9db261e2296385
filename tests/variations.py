"""Tests that CI leaves out, since it runs another one of the same promise; `make test-all` runs them too.

A whole test is marked by `@pytest.mark.variation("test_name_of_what_ci_runs: in which it differs")`, and some cases of a
parametrized one by `variations(...)`. tests/test_variations.py checks that every test named so is one that CI runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def variations(cases: Iterable[Any], *, kept: Collection[Any]) -> list[Any]:
    """Parameters out of all cases, of which CI runs those that are `kept`.

    A case of several values is a tuple, and is kept by itself or by its first value.
    """
    parts = [case if isinstance(case, tuple) else (case,) for case in cases]
    is_kept = [part[0] in kept or part in kept for part in parts]
    unknown = [one for one in kept if not any(one in (part, part[0]) for part in parts)]
    if unknown or not kept:
        raise ValueError(f"kept is {kept!r}: give at least one, and each out of {parts!r}")
    mark = pytest.mark.variation(f"CI runs the cases {', '.join(map(_name, kept))}")
    return [pytest.param(*part, marks=() if stays else mark) for part, stays in zip(parts, is_kept, strict=True)]


def _name(case: Any) -> str:
    return str(getattr(case, "__name__", case))
