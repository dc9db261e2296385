"""Runs, sweeps and verifications below a folder. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from samestep.checkpoint.run_result import RESULT
from samestep.parsing.files import is_file
from samestep.sweep.study_folder import SWEEP

_DEPTH = 3
"""Levels below a folder that are looked at."""
_IN_SWEEP = 3
"""Levels below a sweep at which its trials and their folds are."""
VERIFICATION = Path("verify", "verification.json")
"""In the directory that a verified config names."""


@dataclass
class Folders:
    """The runs, sweeps and verifications in the folders."""

    runs: list[Path] = field(default_factory=list)
    sweeps: list[Path] = field(default_factory=list)
    proofs: list[Path] = field(default_factory=list)
    """The files that verifications have written."""

    @property
    def single_runs(self) -> list[Path]:
        """The runs that are not of a sweep."""
        return [run for run in self.runs if not any(sweep in run.parents for sweep in self.sweeps)]


def find_folders(folder: Path, warn: Callable[[str], None]) -> Folders:
    """Return the runs, sweeps and verifications at most three levels below a folder.

    Args:
        folder: Where to look; it may itself be a run or a sweep.
        warn: Called with a line about each folder that cannot be read.
    """
    found = Folders()
    _look(folder, _DEPTH, found, warn)
    return found


def _look(folder: Path, depth: int, found: Folders, warn: Callable[[str], None]) -> None:
    proof = folder / VERIFICATION
    if is_file(proof):
        found.proofs.append(proof)
    if is_file(folder / RESULT):
        found.runs.append(folder)
        return
    if is_file(folder / SWEEP):
        found.sweeps.append(folder)
        depth = max(depth, _IN_SWEEP)
    if depth:
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
        except OSError as error:
            warn(f"{folder} cannot be read: {error.strerror or error}")
            return
        for inner in inside:
            if inner != proof.parent or proof not in found.proofs:  # the runs that were compared are no others
                _look(inner, depth - 1, found, warn)
