"""Lanes in micro-batches, where a whole one does not fit into the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from samestep.data.batch import LaneBatch
from samestep.errors import CheckpointError, OutOfMemory, TaskError
from samestep.pytree import take_samples
from samestep.reduce.buffer_slots import keep_buffers
from samestep.run_setup import RunSetup
from samestep.step.engine import LossFunction
from samestep.step.lane_passes import LanePasses, WholeLanes


class MicroBatches(WholeLanes):
    """Runs every lane in micro-batches of one size, the same on every rank.

    `auto` tries a lane of the first step with ever smaller ones until it fits on all ranks.
    """

    needs_function = "memory.lane_split"

    def __init__(self, setup: RunSetup, modules: Sequence[nn.Module], params: Sequence[nn.Parameter]) -> None:
        split, lane_batch = setup.config.memory.lane_split, setup.batch.lane_batch
        if split != "auto" and int(split) > lane_batch:
            raise TaskError(
                f"memory.lane_split is {split}, but a lane has {lane_batch} samples: it cannot be "
                "cut into more micro-batches than that"
            )
        self._lane_batch, self._context, self._modules = lane_batch, setup.context, modules
        self._params = params
        self.pieces: int | None = None if split == "auto" else int(split)
        """Micro-batches per whole lane; None until it is found out."""
        self.is_searched = split == "auto"

    def run_lane(self, passes: LanePasses, batch: LaneBatch, loss: LossFunction) -> None:
        pieces = self.cut(batch)
        if len(pieces) == 1:
            super().run_lane(passes, batch, loss)
        else:
            passes.backward_in_pieces(pieces, loss)

    def run_step(self, passes: LanePasses, loss: LossFunction) -> None:
        self.find_pieces(passes, loss)
        super().run_step(passes, loss)

    def cut(self, batch: LaneBatch) -> list[LaneBatch]:
        """Return the micro-batches of a lane."""
        assert self.pieces is not None, "found out before the first lane"
        return cut_batch(batch, self._size(self.pieces))

    def find_pieces(self, passes: LanePasses, loss: LossFunction) -> None:
        """Find out how many micro-batches it takes, unless that is known. Every rank calls this."""
        if self.pieces is not None:
            return
        for first in passes.lanes():
            self.search(first, lambda piece: passes.try_backward(piece, loss))
            return
        self.search(None, lambda piece: None)

    def search(self, batch: LaneBatch | None, attempt: Callable[[LaneBatch], None]) -> None:
        """Try until a batch's forward and backward pass fits on all ranks.

        Args:
            batch: This rank's, or None if it has none in this step.
            attempt: Runs a micro-batch.
        """
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
        self._context.log.main(self._describe(pieces))

    def _describe(self, pieces: int) -> str:
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
                f"memory.lane_split was {saved}, is {self.pieces}: other micro-batches make another run. Set it back"
            )
        self.pieces = saved


def cut_batch(batch: LaneBatch, size: int) -> list[LaneBatch]:
    """Return the batch in parts of `size` samples."""
    whole = len(batch)
    if whole <= size:
        return [batch]
    starts = range(0, whole, size)
    try:
        parts = [take_samples(batch.data, start, start + size, whole) for start in starts]
    except TaskError as error:
        raise TaskError(f"memory.lane_split: {error}") from None
    return [
        replace(batch, data=part, ids=batch.ids[start : start + size])
        for start, part in zip(starts, parts, strict=True)
    ]


def out_of_memory(
    error: torch.OutOfMemoryError, device: torch.device, lane_batch: int, where: str, could_shard: str = ""
) -> OutOfMemory:
    """Return the error as what to do about it.

    Args:
        error: torch's.
        device: Whose memory it is.
        lane_batch: The samples of a lane.
        where: In which step.
        could_shard: The value of `distributed.shard` that would let other ranks hold more; empty for none.
    """
    deals = {
        "optimizer": "distributed.shard: optimizer to deal optimizer states out to the ranks, ",
        "weights": "distributed.shard: weights to deal weights out as well, ",
    }
    return OutOfMemory(
        f"{device} {OutOfMemory.WORDS} {where}, with {lane_batch} samples in a lane. Set "
        f"{deals.get(could_shard, '')}memory.lane_split: auto for micro-batches, more lanes (another run) for smaller ones, "
        "memory.checkpoint to keep fewer activations, or precision: bf16. torch reported: "
        f"{str(error).splitlines()[0] if str(error) else 'out of memory'}"
    )
