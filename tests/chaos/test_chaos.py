"""The short form of `make chaos`."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.chaos import Chaos


def test_some_kills_at_random_instants_and_sizes(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, kills=8, seed=3)
    chaos.play()
    assert sum(chaos.counts.values()) >= 8
    assert len(chaos.counts) >= 2, "of several kinds"
    assert chaos.runs >= 1
