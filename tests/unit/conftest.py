"""What several unit tests stand on."""

from __future__ import annotations

import pytest

from tests.unit.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The activity's clock, in the test's hand."""
    found = Clock()
    monkeypatch.setattr("samestep.distributed.health.activity.perf_counter", found)
    return found
