"""What several unit tests stand on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samestep.distributed.context import SingleProcessContext
from tests.unit.clock import Clock
from tests.unit.contexts import TwoRanks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The activity's clock, in the test's hand."""
    found = Clock()
    monkeypatch.setattr("samestep.distributed.health.activity.perf_counter", found)
    return found


@pytest.fixture
def context() -> Iterator[SingleProcessContext]:
    found = SingleProcessContext()
    yield found
    found.close()


@pytest.fixture
def two_ranks() -> Iterator[TwoRanks]:
    found = TwoRanks()
    yield found
    found.close()
