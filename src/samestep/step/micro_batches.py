"""How a lane fits into the device: activations computed again, and lanes in micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from samestep.data.batch import LaneBatch
from samestep.distributed.context import RunContext
from samestep.errors import CheckpointError, OutOfMemory, TaskError
from samestep.pytree import take_samples
from samestep.step.step import LossFunction, Step, run_at_once


def checkpoint_activations(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let these modules keep no activations for backward but compute them again; gives their names.

    Of modules inside each other only the outermost is told.
    """
    chosen: list[str] = []
    modules = dict(model.named_modules())
    for pattern in patterns:
        if not any(name and fnmatchcase(name, pattern) for name in modules):
            known = ", ".join(name for name in modules if name and "." not in name)
            raise TaskError(
                f"memory.checkpoint: {pattern!r} matches no module; the model has "
                + (f"{known}, and what is inside of them" if known else "none inside of it")
            )
    for name, module in modules.items():
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if name and not inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            module.forward = _computed_again(module)
            chosen.append(name)
    return chosen


def _computed_again(module: nn.Module) -> Callable[..., Any]:
    # The RNG is put back for the second pass, so that dropout drops the same.
    forward = partial(checkpoint, module.forward, use_reentrant=False)
    if not any(True for _ in module.buffers()):
        return forward
    # Else BatchNorm's statistics would move twice.
    return partial(forward, context_fn=partial(_both_passes, module))


def _both_passes(module: nn.Module) -> tuple[Any, Any]:
    return nullcontext(), keep_buffers([module])


@contextmanager
def keep_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave buffers as they were before."""
    buffers = [buffer for module in modules for buffer in module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in zip(buffers, before, strict=True):
                buffer.copy_(old)


class LaneSplit:
    """Runs every lane in micro-batches of one size, the same on every rank.

    `auto` tries a lane of the first step with ever smaller ones until it fits on all ranks.
    """

    def __init__(
        self,
        asked: int | str,
        lane_batch: int,
        context: RunContext,
        modules: Sequence[nn.Module],
        params: Sequence[nn.Parameter],
    ) -> None:
        if asked != "auto" and int(asked) > lane_batch:
            raise TaskError(
                f"memory.lane_split is {asked}, but a lane has {lane_batch} samples: it cannot be cut "
                "into more micro-batches than that"
            )
        self._lane_batch, self._context, self._modules = lane_batch, context, modules
        self._params = params
        """What the optimizers train."""
        self.pieces: int | None = None if asked == "auto" else int(asked)
        """Micro-batches per whole lane; None until it is found out."""
        self.was_searched = asked == "auto"

    def run_lane(self, step: Step, batch: LaneBatch, loss: LossFunction) -> None:
        assert self.pieces is not None, "found out before the first lane"
        pieces = cut_batch(step.on_device(batch), self._size(self.pieces))
        if len(pieces) == 1:
            run_at_once(step, batch, loss)
            return
        step.draw_from_lane()
        with step.sharing(), step.precision.forward():
            step.backward_in_pieces(pieces, loss)

    def before_lanes(self, step: Step, loss: LossFunction) -> None:
        """Find out how many micro-batches it takes, if that is not known yet."""
        if self.pieces is None:
            first = None
            for first in step.lanes:
                self.find_out(first, lambda piece: step.attempt(piece, loss))
                break
            if first is None:
                self.find_out(None, lambda piece: None)

    def find_out(self, batch: LaneBatch | None, attempt: Callable[[LaneBatch], None]) -> None:
        """Try until a batch's forward and backward pass fits on all ranks; each gives its own."""
        pieces = 1
        while True:
            fits = batch is None or self._fits(cut_batch(batch, self._size(pieces)), attempt)
            if all(self._context.gather(fits)):
                break
            if pieces >= self._lane_batch:
                raise OutOfMemory(
                    "memory.lane_split: auto found no micro-batch that fits: even one sample does "
                    f"not, on {self._context.device}. Use memory.checkpoint, bf16 or a smaller model"
                )
            pieces = min(2 * pieces, self._lane_batch)
        self.pieces = pieces
        self._context.log.main(self._told(pieces))

    def _told(self, pieces: int) -> str:
        size = self._size(pieces)
        pieces = self._size(size)  # 6 samples in 4 pieces of 2 are 3 pieces
        if pieces == 1:
            return f"memory.lane_split: auto: a lane of {size} samples fits as it is"
        return (
            f"memory.lane_split: auto runs each lane of {self._lane_batch} samples in {pieces} "
            f"micro-batches of {size}. BatchNorm normalises over {size} samples now, and dropout "
            f"draws for {size} at a time: it is another run than one with whole lanes. "
            f"memory.lane_split: {pieces} makes it the same run on any machine"
        )

    def _size(self, pieces: int) -> int:
        return -(-self._lane_batch // pieces)

    def _fits(self, pieces: Sequence[LaneBatch], attempt: Callable[[LaneBatch], None]) -> bool:
        try:
            with keep_buffers(self._modules):
                # What optimizers keep of each parameter is there only after the first update.
                reserve = [torch.empty_like(param) for param in self._params for _ in range(2)]
                for piece in pieces:
                    attempt(piece)
                del reserve
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            inside = (param for module in self._modules for param in module.parameters())
            for param in (*self._params, *inside):
                param.grad = None
            if self._context.device.type == "cuda":
                torch.cuda.empty_cache()

    def state_dict(self) -> dict[str, Any]:
        return {"pieces": self.pieces}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["pieces"]
        if self.pieces is not None and self._size(self.pieces) != self._size(saved):
            raise CheckpointError(
                f"memory.lane_split was {saved}, is {self.pieces}: other micro-batches make another "
                "run. Set it back"
            )
        self.pieces = saved


def cut_batch(batch: LaneBatch, size: int) -> list[LaneBatch]:
    """The batch in parts of `size` samples."""
    whole = len(batch)
    if whole <= size:
        return [batch]
    starts = range(0, whole, size)
    try:
        parts = [take_samples(batch.data, start, start + size, whole) for start in starts]
    except TaskError as error:
        raise TaskError(f"memory.lane_split: {error}") from None
    return [
        LaneBatch(batch.lane, part, batch.ids[start : start + size])
        for start, part in zip(starts, parts, strict=True)
    ]


def out_of_memory(
    error: torch.OutOfMemoryError, device: torch.device, lane_batch: int, where: str
) -> OutOfMemory:
    """The error as what to do about it."""
    return OutOfMemory(
        f"{device} has too little memory {where}, with {lane_batch} samples in a lane. Set "
        "memory.lane_split: auto for micro-batches, more lanes (another run) for smaller ones, "
        "memory.checkpoint to keep fewer activations, or precision: bf16. torch said: "
        f"{str(error).splitlines()[0] if str(error) else 'out of memory'}"
    )
