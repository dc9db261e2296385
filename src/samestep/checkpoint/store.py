"""Writes a run's checkpoints behind the training. Rank 0's, but for parts of others."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from samestep.checkpoint.files import DigestedFile, Files
from samestep.checkpoint.format import read_model, write_checkpoint, write_part, write_safetensors
from samestep.checkpoint.manifest import MODEL, PARTIAL, SURVIVOR, Manifest, folder_name
from samestep.checkpoint.parts import WHOLE, Part, Patience, files_of
from samestep.checkpoint.retention import Retention
from samestep.errors import CheckpointError


class CheckpointStore:
    """Writes a run's checkpoints one at a time, in a thread, and removes those not kept.

    Args:
        folder: where the checkpoints are, usually `<run>/checkpoints`.
        keep_last: how many of the newest stay.
        files: the file operations; tests pass failing ones.
        keep_best: how many of the best stay besides those.
        patience: how long to wait for the parts of other ranks.
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        files: Files | None = None,
        keep_best: int = 1,
        patience: Patience | None = None,
    ) -> None:
        self._folder = folder
        self._files = files or Files()
        self._retention = Retention(folder, keep_last, keep_best, self._files)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._writing = ""
        self._written = False
        self._patience = patience or Patience()
        self._exported: int | None = None
        """The step whose weights were exported beside the checkpoints by this process."""

    def begin_parts(self, step: int) -> None:
        """Make the directory that all ranks write their parts to. Rank 0 calls this, after `wait`."""
        partial = self.partial(step)
        try:
            self._files.remove(partial)
            self._files.make_folder(partial)
        except OSError as error:
            raise CheckpointError(f"{partial} could not be made: {error.strerror or error}") from error

    def partial(self, step: int) -> Path:
        """Return where a checkpoint is until it is written."""
        return self._folder / (folder_name(step) + PARTIAL)

    def write(
        self, model: Mapping[str, Tensor], training: Mapping[str, Any], manifest: Manifest, part: Part = WHOLE
    ) -> None:
        """Start writing a checkpoint, or a part of it. The arguments must not change until `wait`."""
        self.wait()
        self._writing = folder_name(manifest.step)
        self._thread = threading.Thread(
            target=self._write_in_thread, args=(model, training, manifest, part), name="samestep-save"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write in flight; raises its error, once."""
        self.finish()
        error, self._error = self._error, None
        if error is None:
            return
        if isinstance(error, OSError):
            if not self._folder.parent.is_dir():
                raise CheckpointError(
                    f"run directory {self._folder.parent} is gone: it was removed or renamed while the "
                    "run was using it. Put it back and start the run again to resume; without its "
                    "checkpoints it starts from the beginning"
                ) from error
            folder = self._folder / self._writing
            what, intact = (f"checkpoint {folder} could not be written", "The checkpoints before it are")
            if self._written:
                what, intact = f"the files beside {folder} could not be cleaned up", "It is"
            raise CheckpointError(
                f"{what}: {error.strerror or error}. {intact} intact: free space or fix the disk, "
                "and start the run again to resume from the newest"
            ) from error
        raise error

    def finish(self, ending: bool = False) -> None:
        """Wait for the write in flight, whether it succeeds or fails. From any thread.

        Args:
            ending: Whether the run ends by an error; it does not wait for parts that nobody writes.
        """
        if ending:
            self._patience.ending.set()
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None

    def _write_in_thread(
        self, model: Mapping[str, Tensor], training: Mapping[str, Any], manifest: Manifest, part: Part
    ) -> None:
        try:
            self.write_now(model, training, manifest, part)
        except BaseException as error:
            self._error = error  # `wait` raises it in the main thread

    def write_now(
        self, model: Mapping[str, Tensor], training: Mapping[str, Any], manifest: Manifest, part: Part = WHOLE
    ) -> None:
        """Write a checkpoint, export the best weights, and remove what is not kept; or write another rank's part."""
        self._written = False
        if part.number > 0:
            write_part(self._files, self.partial(manifest.step), model, training, part)
            return
        folder = self._folder / folder_name(manifest.step)
        write_checkpoint(self._files, folder, model, training, manifest, part, self._patience)
        self._written = True
        self.export_best(manifest)
        self._retention.remove_old(manifest)

    def export_best(self, manifest: Manifest) -> None:
        """Keep `model.safetensors` of the best step, or the last, beside the checkpoints."""
        step = manifest.step if manifest.best is None else manifest.best.step
        folder = self._folder / folder_name(step)
        if not any(file.exists() for file in files_of(folder, MODEL)):
            return
        target = self._folder.parent / MODEL
        if self._exported == step and target.exists():
            return
        partial = target.with_name(MODEL + PARTIAL)
        self._files.remove(partial)
        if (folder / MODEL).exists():
            self._files.copy(folder / MODEL, partial)
        else:  # tensor by tensor: no rank has memory for all of them
            with DigestedFile(self._files, partial) as file:
                write_safetensors(file, read_model(folder))
        self._files.replace(partial, target)
        self._exported = step

    def repair_export(self, manifest: Manifest) -> None:
        """Export the weights again, in case the run was killed between a checkpoint and its export."""
        try:
            self.export_best(manifest)
        except OSError as error:
            raise CheckpointError(
                f"{self._folder.parent / MODEL} could not be written: {error.strerror or error}"
            ) from error

    def remove_unfinished(self) -> None:
        """Remove what survivors of lost ranks began to write. Before the first save of a run."""
        for leftover in self._folder.glob(f"*{SURVIVOR}*"):
            self._files.remove(leftover)
