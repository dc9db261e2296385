"""Keeps the last and the best checkpoints of a run, and removes the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.checkpoint.files import Files
from samestep.checkpoint.listing import FoundCheckpoint, list_checkpoints, rank_by_metric
from samestep.checkpoint.manifest import PARTIAL, Manifest, folder_name


@dataclass(frozen=True)
class Retention:
    """`checkpoint.keep_last` and `checkpoint.keep_best`, for the checkpoints in a folder."""

    folder: Path
    keep_last: int
    keep_best: int
    files: Files

    def remove_old(self, manifest: Manifest) -> None:
        """Remove all but the last and best ones; the one of `manifest`, just written, always stays."""
        usable = [c for c in list_checkpoints(self.folder, checksums=False) if not c.wrong]
        found = [c for c in usable if c.step <= manifest.step]
        here = [c.folder for c in found]
        kept = {folder.name for folder in here[-self.keep_last :]} | self._best(manifest, found)
        for folder in here:
            if folder.name not in kept:
                # Renamed first: a half-removed one must not look like a checkpoint.
                doomed = folder.with_name(folder.name + PARTIAL)
                self.files.remove(doomed)
                self.files.replace(folder, doomed)
                self.files.remove(doomed)
        for leftover in self.folder.glob(f"*{PARTIAL}"):
            self.files.remove(leftover)

    def _best(self, manifest: Manifest, found: Sequence[FoundCheckpoint]) -> set[str]:
        """Return the names of the best so far and of those with the next best values, `keep_best` in all."""
        first = [] if manifest.best is None else [folder_name(manifest.best.step)]
        others = [c.folder.name for c in rank_by_metric(found, manifest.config.get("best", {}))]
        return set([*first, *(name for name in others if name not in first)][: self.keep_best])
