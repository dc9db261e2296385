"""Saves the last step boundary when ranks are lost: one that is left does so, without any of the others.

Weights, optimizers, averages, schedules and the position are the same on every rank, and nothing of
them changes before the step's exchange has succeeded. So where it breaks, every survivor holds the
state of the boundary, but for the buffers that its lanes have touched, which are put back. EmergencySaver
can be one step apart: some had what they waited for. Each saves what it has, one after the other,
and the newest counts.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout
from torch import Tensor

from samestep.checkpoint.files import Files
from samestep.checkpoint.format import put_in_place, write_files
from samestep.checkpoint.listing import list_checkpoints
from samestep.checkpoint.manifest import SURVIVOR, folder_name
from samestep.data.batch import Position
from samestep.distributed.health.activity import EXCHANGE, SAVE
from samestep.errors import CheckpointError, NonFiniteLoss, PeerLost
from samestep.run.run_dir import holder_of
from samestep.run.run_log import RunLog
from samestep.run.saver import Saver
from samestep.run_setup import RunSetup
from samestep.step.lane_passes import LanePasses

_SECONDS = 10.0
"""By how much this may delay the end of a rank; a save that takes longer is given up."""
_SYNCED_AT_ONCE = 1 << 24
_LOCK = "survivors.lock"
_NOT_OURS = "its directory is gone, or another run's by now"


@dataclass(frozen=True)
class _Boundary:
    """The end of the last step, as a save there would describe it."""

    after: Position
    plan: Mapping[str, Any]
    ended: str | None


class EmergencySaver:
    """Saves the boundary that this rank holds when it has lost another one."""

    def __init__(self, setup: RunSetup, saver: Saver, log: RunLog, passes: Callable[[], LanePasses | None]) -> None:
        """Args:
        passes: The step that is running; None between two.
        """
        self._context, self._config = setup.context, setup.config
        self._saver, self._log, self._passes = saver, log, passes
        self._run_dir = setup.config.run_path
        self._holder = holder_of(self._run_dir)
        self._boundary: _Boundary | None = None
        self._turn = threading.Lock()
        self._has_tried = False
        self.why_not = "your own loop may have changed more than its last step did"
        """Why the state of the last boundary is not known to this rank; empty if it is."""
        self._context.before_end(self._save_before_end)

    def reached(self, after: Position, plan: Mapping[str, Any], ended: str | None) -> None:
        """A step is over: what it would be saved as."""
        self._boundary = _Boundary(after, plan, ended)
        self._log.recent.reached()

    def save(self, lost: PeerLost) -> None:
        """Save, in a step after a rank was lost, where the step before it ended, if that is known."""
        # A hang, or ranks that call different collectives: nobody is known to be gone.
        with self._context.activity.during(SAVE):
            why_not = "the exchange timed out: no rank is known to be lost"
            self._try(why_not if lost.timed_out else "")

    def _save_before_end(self) -> None:
        """Save from another thread before it ends this process, whose main thread waits in an exchange."""
        if self._passes() is not None and self._context.activity.phase == EXCHANGE:
            self._try("")
        self._saver.finish_write()

    def report(self, error: BaseException | None) -> None:
        """Log at the run's end why nothing was saved after a rank was lost."""
        if isinstance(error, PeerLost) and not self._has_tried:
            self._try("the last step had been updated and was not over, as in an evaluation")

    def _try(self, why_not: str) -> None:
        """Save, and log what came of it; an error here must not hide the loss of the rank."""
        with self._turn:
            boundary, tried = self._boundary, self._has_tried
            self._has_tried = True
            if boundary is None or tried or not self._config.checkpoint.enabled:
                return
            log, step = self._context.log, boundary.after.step
            try:
                why_not = self._why_not() or why_not or self._save(boundary)
            except NonFiniteLoss:
                why_not = "a loss or weight since then is NaN or infinite"
            except Exception as error:
                why_not = f"saving step {step} failed: {getattr(error, 'strerror', None) or error}"
            if why_not:
                log.warn(f"Lost a rank. Started again, the run resumes from its last checkpoint: {why_not}")
            else:
                log.everyone(f"Lost a rank. The run is saved after step {step}; started again, it resumes there")

    def _why_not(self) -> str:
        """Return why this rank does not hold the run's whole state."""
        if self._context.device.type != "cpu":
            return "a GPU that waits in the broken exchange cannot be read"
        if self._config.distributed.shard != "none":
            return "the optimizer states of the lost rank are gone with it (distributed.shard)"
        if self._config.same == "samples":
            return "with same: samples every rank has buffers of its own"
        ema = self._config.ema
        if ema is not None and ema.policy == "rank0" and not self._context.is_main:
            return "only rank 0 holds the average (ema.policy: rank0)"
        return self.why_not or self._with_extra_state()

    def _with_extra_state(self) -> str:
        for module in self._saver.state.modules:
            extra = [k for k, v in module.state_dict().items() if not isinstance(v, Tensor)]
            if extra:
                return f"forward may have changed what is no tensor: {extra[0]}"
        return ""

    def _save(self, boundary: _Boundary) -> str:
        """Write the boundary's checkpoint unless there is one; returns why it could not."""
        deadline = time.monotonic() + _SECONDS
        self._saver.finish_write()  # of rank 0: it may be this very step
        step, rank = boundary.after.step, self._context.rank
        folder = self._saver.folder / folder_name(step)
        if self._holder is None:
            return "this machine does not see the run's directory"
        if holder_of(self._run_dir) != self._holder:
            return _NOT_OURS
        with _one_at_a_time(self._run_dir / _LOCK):
            if self._is_saved(step):
                return ""
            self._log.flush_alone()
            model, training, manifest = self._copy(boundary)
            files = _DeadlineFiles(deadline)
            partial = folder.with_name(f"{folder.name}{SURVIVOR}{rank}")
            try:
                write_files(files, partial, model, training, manifest)
                if holder_of(self._run_dir) != self._holder:
                    return _NOT_OURS
                put_in_place(files, partial, folder)
            finally:
                files.remove(partial)
        return ""

    def _is_saved(self, step: int) -> bool:
        found = list_checkpoints(self._saver.folder, checksums=False)
        return any(item.step >= step for item in found if not item.wrong)

    def _copy(self, boundary: _Boundary) -> Any:
        activity, passes = self._context.activity, self._passes()
        moves = activity.moves
        moving = activity.phase not in (SAVE, EXCHANGE)
        if moving or passes is None or passes.changes_weights:
            raise CheckpointError("the step had begun to change the weights")
        passes.undo_lanes()
        passes.refuse_bad_weights()
        after, plan, ended = boundary.after, boundary.plan, boundary.ended
        taken = self._saver.take(after, plan, ended, {"rows": self._log.recent.kept()})
        if activity.moves != moves:
            raise CheckpointError("the step went on after all")
        return taken


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Let survivors that hold the same step find it saved by the first of them."""
    lock = FileLock(path, fallback_to_soft=False, thread_local=False)
    with ExitStack() as held:
        try:
            held.enter_context(lock.acquire(_SECONDS, poll_interval=0.02))
        except Timeout:
            raise CheckpointError(f"another rank has been saving for {_SECONDS:g} s") from None
        except OSError:
            held.close()  # no locks on this file system: two that write the same step do no harm
        yield


class _DeadlineFiles(Files):
    """Writes until a deadline, and to the disk itself, so that no sync at the end takes long."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def open_new(self, path: Path) -> IO[bytes]:
        return _HastyFile(path, self._deadline)


class _HastyFile(io.FileIO):
    def __init__(self, path: Path, deadline: float) -> None:
        super().__init__(path, "wb")
        self._deadline, self._unsynced = deadline, 0

    def write(self, data: Any) -> int:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"the disk took longer than {_SECONDS:g} s")
        written = super().write(memoryview(data)[:_SYNCED_AT_ONCE]) or 0
        self._unsynced += written
        if self._unsynced >= _SYNCED_AT_ONCE:
            os.fsync(self.fileno())
            self._unsynced = 0
        return written
