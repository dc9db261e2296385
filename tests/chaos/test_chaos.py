"""The short form of `make chaos`."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.chaos import Chaos


def test_a_dozen_kills_at_random_instants_and_sizes(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, kills=12, seed=3)
    chaos.play()
    assert sum(chaos.counts.values()) >= 12
    assert len(chaos.counts) >= 4, "of most kinds"
    assert chaos.runs >= 1
