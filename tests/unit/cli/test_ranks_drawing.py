"""The table of ranks in the live view."""

from __future__ import annotations

from samestep.cli.ui.run_pages import draw_ranks

DOCUMENT = {
    "ranks": [
        {"rank": 0, "host": "n1", "step": 7, "phase": "compute", "seconds": 0.1, "beat": 100.0, "lanes": [0, 1]},
        {"rank": 1, "host": "n2", "step": 6, "phase": "data loading", "seconds": 9.0, "beat": 60.0, "lanes": [2, 3]},
    ]
}


def test_a_rank_shows_what_it_does_and_when_it_was_heard() -> None:
    shown = draw_ranks(DOCUMENT, is_over=False, now=101.0)
    assert "data loading for 9 s" in shown
    assert "41 s ago" in shown
    assert shown.count("broken") == 1, "the late one"


def test_of_a_run_that_is_over_the_last_heartbeats_say_nothing() -> None:
    shown = draw_ranks(DOCUMENT, is_over=True, now=101.0)
    assert "n2" in shown
    assert "data loading" not in shown
    assert "ago" not in shown
