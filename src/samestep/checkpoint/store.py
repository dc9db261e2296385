"""The checkpoints of one run: found, written behind the training, thinned out. Rank 0 writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from samestep.checkpoint.files import Files
from samestep.checkpoint.format import (
    MODEL,
    PARTIAL,
    Manifest,
    folder_name,
    verify_checkpoint,
    write_checkpoint,
)
from samestep.errors import CheckpointError


@dataclass(frozen=True)
class Found:
    """A directory that is, or looks like, a checkpoint."""

    folder: Path
    manifest: Manifest | None
    wrong: str = ""
    """Why it cannot be used; empty if it can."""

    @property
    def step(self) -> int:
        return int(self.folder.name.removeprefix("step-"))

    @property
    def size(self) -> int:
        """Bytes; 0 if it is being removed meanwhile."""
        try:
            return sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
        except FileNotFoundError:
            return 0


def list_checkpoints(folder: Path, *, checksums: bool) -> list[Found]:
    """Every checkpoint in a folder by step; those that cannot be used say why."""
    found = []
    for path in folder.glob("step-*"):
        if not path.name.removeprefix("step-").isdigit() or not path.is_dir():
            continue  # a save that never ended, or nothing of ours
        try:
            found.append(Found(path, verify_checkpoint(path, checksums=checksums)))
        except CheckpointError as error:
            if path.exists():  # else it was removed while we looked
                found.append(Found(path, None, str(error)))
    return sorted(found, key=lambda item: item.step)


def by_value(found: Sequence[Found], rule: Mapping[str, Any]) -> list[Found]:
    """Checkpoints whose own weights were measured, the best first, by the rule of `best:`."""
    sign = -1 if rule.get("mode") == "max" else 1
    values = [
        (sign * value, item.step, item)
        for item in found
        if item.manifest is not None
        and (value := item.manifest.value_of(rule.get("metric", "val_loss"))) is not None
    ]
    return [item for _, _, item in sorted(values, key=lambda entry: entry[:2])]


def newest_valid(folder: Path, warn: Callable[[str], None]) -> Found | None:
    """The newest checkpoint whose every byte is as it was written; names those that are not.

    If there are some and none of them can be used, that is an error: a run must not begin
    anew because a disk did not answer.
    """
    candidates = list_checkpoints(folder, checksums=False)
    for candidate in reversed(candidates):
        wrong = candidate.wrong
        if not wrong:
            try:
                return Found(candidate.folder, verify_checkpoint(candidate.folder))
            except CheckpointError as error:
                wrong = str(error)
        warn(f"checkpoint {candidate.folder} is not used: {wrong}")
    if candidates:
        raise CheckpointError(
            f"none of the {len(candidates)} checkpoint(s) in {folder} can be used; the newest: {wrong}. "
            "Mend them, or begin anew with resume=never, which sets them aside"
        )
    return None


class CheckpointStore:
    """Writes a run's checkpoints one at a time, in a thread, and removes those not kept."""

    def __init__(
        self, folder: Path, keep_last: int, files: Files | None = None, keep_best: int = 1
    ) -> None:
        self._folder = folder
        self._keep_last, self._keep_best = keep_last, keep_best
        self._files = files or Files()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._writing = ""
        self._written = False
        self._exported: int | None = None
        """The step whose weights lie beside the checkpoints, if this process put them there."""

    def write(
        self, model: Mapping[str, Tensor], training: Mapping[str, Any], manifest: Manifest
    ) -> None:
        """Begin to write a checkpoint. What is given must stay as it is until `wait`."""
        self.wait()
        self._writing = folder_name(manifest.step)
        self._thread = threading.Thread(
            target=self._work, args=(model, training, manifest), name="samestep-save"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write in flight; raises what went wrong with it."""
        self.finish()
        error, self._error = self._error, None
        if error is None:
            return
        if isinstance(error, OSError):
            folder = self._folder / self._writing
            what, whole = (
                f"checkpoint {folder} could not be written",
                "The checkpoints before it are",
            )
            if self._written:
                what, whole = f"the files beside {folder} could not be tidied", "It is"
            raise CheckpointError(
                f"{what}: {error.strerror or error}. {whole} whole: make room or mend the disk, and "
                "start the run again to go on from the newest"
            ) from error
        raise error

    def finish(self) -> None:
        """Wait for the write in flight, whatever comes of it. From any thread."""
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None

    def _work(
        self, model: Mapping[str, Tensor], training: Mapping[str, Any], manifest: Manifest
    ) -> None:
        try:
            self.write_now(model, training, manifest)
        except BaseException as error:
            self._error = error  # `wait` raises it in the main thread

    def write_now(
        self, model: Mapping[str, Tensor], training: Mapping[str, Any], manifest: Manifest
    ) -> None:
        """Write a checkpoint, export the best weights, and remove what is not kept."""
        folder = self._folder / folder_name(manifest.step)
        self._written = False
        write_checkpoint(self._files, folder, model, training, manifest)
        self._written = True
        self.export_best(manifest)
        self._thin_out(manifest)

    def export_best(self, manifest: Manifest) -> None:
        """Keep `model.safetensors` of the best step, or the last, beside the checkpoints."""
        step = manifest.step if manifest.best is None else manifest.best.step
        source = self._folder / folder_name(step) / MODEL
        if not source.exists():
            return
        target = self._folder.parent / MODEL
        if self._exported == step and target.exists():
            return
        partial = target.with_name(MODEL + PARTIAL)
        self._files.remove(partial)
        self._files.copy(source, partial)
        self._files.replace(partial, target)
        self._exported = step

    def mend_export(self, manifest: Manifest) -> None:
        """Export what a kill between a checkpoint and its export left undone."""
        try:
            self.export_best(manifest)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder.parent / MODEL} could not be written: {error.strerror or error}"
            ) from error

    def _best(self, manifest: Manifest, found: Sequence[Found]) -> set[str]:
        """The best so far, and after it those with the best values, up to so many."""
        first = [] if manifest.best is None else [folder_name(manifest.best.step)]
        others = [c.folder.name for c in by_value(found, manifest.config.get("best", {}))]
        return set([*first, *(name for name in others if name not in first)][: self._keep_best])

    def _thin_out(self, manifest: Manifest) -> None:
        """Remove all but the last and best ones; the one just written is always among them."""
        usable = [c for c in list_checkpoints(self._folder, checksums=False) if not c.wrong]
        found = [c for c in usable if c.step <= manifest.step]
        here = [c.folder for c in found]
        kept = {folder.name for folder in here[-self._keep_last :]} | self._best(manifest, found)
        for folder in here:
            if folder.name not in kept:
                # Under another name first: half a removal must not look like a checkpoint.
                doomed = folder.with_name(folder.name + PARTIAL)
                self._files.remove(doomed)
                self._files.replace(folder, doomed)
                self._files.remove(doomed)
        for left in self._folder.glob(f"*{PARTIAL}"):
            self._files.remove(left)
