"""The metrics that are drawn, their order and their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from samestep.errors import RunDirError
from samestep.report.curves.history import History

_FIRST = ("loss", "loss/*")
_LAST = ("lr", "grad_norm", "loss_scale", "samples_per_second", "peak_memory_mb")
_ON_REQUEST = ("epoch", "count", "seconds", "time_*", "rank_spread", "slowest_rank")
"""Metrics of every run that are seldom drawn: `samestep show` prints them."""
MOST_PANELS = 60
_TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "loss_scale": "loss scale",
    "samples_per_second": "samples per second",
    "peak_memory_mb": "peak memory in MB",
}


def known_metrics(histories: Sequence[History]) -> list[str]:
    """Return the names of all that was measured, in the order of the first run that has it."""
    return list(dict.fromkeys(name for history in histories for name in history.metrics))


def choose(histories: Sequence[History], wanted: Sequence[str]) -> list[str]:
    """Return the metrics to draw: what is wanted, or what a person follows.

    Args:
        histories: the runs.
        wanted: names, also with the wildcards `*` and `?`; `lr` is all of `lr[0]`, `lr[1]`.

    Raises:
        RunDirError: if there is nothing, or nothing of such a name.
    """
    known = known_metrics(histories)
    if not known:
        raise RunDirError(
            f"{', '.join(str(history.run) for history in histories)}: no numbers yet: they come "
            "with every log_every steps"
        )
    if not wanted:
        return _followed(known)
    chosen: dict[str, None] = {}
    for name in wanted:
        matching = [one for one in known if _matches(one, name)]
        if not matching:
            raise RunDirError(f"no run has a metric {name!a}: there are {', '.join(known)}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def base(metric: str) -> str:
    """Return what the curves of one list have in common: `lr` for `lr[0]`."""
    return re.sub(r"\[[0-9]+\]$", "", metric)


def title(metric: str) -> str:
    """Return what a person calls it."""
    return _TITLES.get(metric, metric)


def _followed(known: Sequence[str]) -> list[str]:
    def named(patterns: Sequence[str]) -> list[str]:
        return [name for pattern in patterns for name in known if _matches(name, pattern)]

    first, last, hidden = named(_FIRST), named(_LAST), named(_ON_REQUEST)
    own = [name for name in known if name not in {*first, *last, *hidden}]
    return [*first, *own, *last] or list(known)


def _matches(name: str, pattern: str) -> bool:
    return pattern in (name, base(name)) or fnmatchcase(name, pattern)
