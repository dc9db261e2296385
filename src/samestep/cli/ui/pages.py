"""The pages of the live view: which one an address means, and which ones show a whole folder."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from samestep.cli.ui.overview import Find, ProofsView, RunsView, SweepsView
from samestep.cli.ui.run_pages import CompareView, RunView
from samestep.cli.ui.run_state import read_state
from samestep.cli.ui.sweep_page import SweepView
from samestep.cli.ui.view import View

_MOST_COMPARED = 50
_MOST_SHARED = 20
"""Runs that are shown whole in one file: each has some hundred kilobytes."""


class Pages:
    """The pages about what is in some folders."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._lists: dict[str, View] = {"": RunsView(find), "sweeps": SweepsView(find), "proofs": ProofsView(find)}

    def at(self, address: str) -> View | None:
        """Return the page of an address, such as `run?path=runs/a`; None if there is none."""
        parts = urlsplit(address)
        kind, paths = parts.path.strip("/"), parse_qs(parts.query).get("path", [])
        if kind in self._lists:
            return self._lists[kind]
        # Only what was found: a path is a name here, not a place on the disk.
        found = self._find()
        runs = [run for name in paths for run in found.runs if str(run) == name]
        if kind == "run" and runs:
            return RunView(runs[0])
        if kind == "compare" and runs:
            return CompareView(list(dict.fromkeys(runs))[:_MOST_COMPARED])
        sweeps = [sweep for sweep in found.sweeps if str(sweep) in paths]
        return SweepView(sweeps[0], self._find) if kind == "sweep" and sweeps else None

    def all(self) -> Sequence[View]:
        """Return the lists, the newest runs, and the sweeps."""
        found = self._find()
        newest = sorted(found.single_runs, key=lambda run: -read_state(run).changed)[:_MOST_SHARED]
        whole: list[View] = [RunView(run) for run in newest]
        whole += [SweepView(sweep, self._find) for sweep in found.sweeps]
        listed = {"": len(found.single_runs) > 1, "sweeps": len(found.sweeps) > 1, "proofs": bool(found.proofs)}
        return [*(self._lists[name] for name, is_shown in listed.items() if is_shown), *whole] or [self._lists[""]]
