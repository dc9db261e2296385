"""Data that a function draws: a lane's batch is a function of (seed, step, lane)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samestep.data.map_style import MapSource, as_it_is
from samestep.errors import TaskError
from samestep.lanes.plan import EpochPlan
from samestep.lanes.random_streams import DATA, derive, reseed, seed_at
from samestep.pytree import leaves, map_leaves, tensors
from samestep.run_setup import RunSetup

GetBatch = Callable[[torch.Generator, int], Any]
"""`get_batch(generator, size)`: a batch of so many samples, drawn with the generator."""


class Generated:
    """Batches that a function draws itself, as data for `run.steps` or `train_data`.

    The function is called once for each lane of each step, with a generator whose numbers follow from
    the run's seed, the step and the lane; python's, numpy's and torch's own generators do, too.

    Args:
        get_batch: `get_batch(generator, size)` returns a batch of `size` samples, in host memory.
        steps_per_epoch: How many steps are an epoch; the config's unless given, or the whole run.

    Example:
        def get_batch(generator, size):
            at = torch.randint(len(tokens) - 256, (size,), generator=generator)
            x = torch.stack([tokens[i : i + 256] for i in at])
            y = torch.stack([tokens[i + 1 : i + 257] for i in at])
            return x, y

        for step in run.steps(samestep.Generated(get_batch)): ...
    """

    def __init__(self, get_batch: GetBatch, steps_per_epoch: int | None = None) -> None:
        _refuse_other_parameters(get_batch)
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise TaskError(f"samestep.Generated got steps_per_epoch={steps_per_epoch}: an epoch has some")
        self.get_batch, self.steps_per_epoch = get_batch, steps_per_epoch


def generated_source(setup: RunSetup, data: Generated) -> MapSource:
    """Return the steps of drawn data.

    Raises:
        TaskError: It is not known how long an epoch is.
    """
    config = setup.config
    steps = data.steps_per_epoch or config.steps_per_epoch or config.steps
    if steps is None:
        raise TaskError(
            "what a function draws has no end: set steps, or give samestep.Generated the steps_per_epoch of "
            f"{config.epochs} epochs"
        )
    samples = steps * setup.batch.global_batch

    def order(seed: int, epoch: int) -> Sequence[int]:
        # A sample's number in the whole run, so that it says which step and lane it is of.
        return range(epoch * samples, (epoch + 1) * samples)

    reader = _GeneratedLanes(data.get_batch, config.seed, setup.batch.lane_batch)
    plan = EpochPlan(samples, setup.batch)
    return MapSource(setup, reader, order, plan, as_it_is)


class _GeneratedLanes:
    """A dataset whose samples are read as whole lanes."""

    def __init__(self, get_batch: GetBatch, seed: int, lane_batch: int) -> None:
        self._get_batch, self._lane_batch = get_batch, lane_batch
        self._root = derive(seed, DATA, "drawn")

    def __getitems__(self, numbers: Sequence[int]) -> Any:
        # More than one where lanes are fused.
        lanes = [number // self._lane_batch for number in numbers[:: self._lane_batch]]
        return _joined([self._lane(lane) for lane in lanes])

    def _lane(self, number: int) -> Any:
        """Return the batch of a lane, by its number in the whole run."""
        seed, size = seed_at(self._root, number), self._lane_batch
        reseed(seed)
        batch = self._get_batch(torch.Generator().manual_seed(seed), size)
        found = tensors(batch)
        rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in found}
        if found and size not in rows:
            raise TaskError(
                f"get_batch was asked for {size} samples, the size of a lane, and returned tensors with "
                f"{', '.join(map(str, sorted(rows)))} rows: draw as many as its second argument says"
            )
        if any(tensor.device.type != "cpu" for tensor in found):
            raise TaskError(
                "get_batch returned tensors on a device: return them in host memory, batches are moved there "
                "ahead of their step"
            )
        return batch


def _joined(batches: Sequence[Any]) -> Any:
    first, *others = batches
    if not others:
        return first
    rest = [iter(leaves(batch)) for batch in others]

    def join(leaf: Any) -> Any:
        parts = [leaf, *(next(other) for other in rest)]
        if not all(isinstance(part, Tensor) for part in parts):
            raise TaskError(
                f"get_batch returned a {type(leaf).__name__} among its tensors, and same: samples joins the "
                "batches of a rank's lanes: return tensors only"
            )
        return torch.cat(parts)

    return map_leaves(join, first)


def _refuse_other_parameters(get_batch: GetBatch) -> None:
    try:
        inspect.signature(get_batch).bind(None, 1)
    except TypeError as error:
        name = getattr(get_batch, "__name__", type(get_batch).__name__)
        raise TaskError(
            f"samestep.Generated calls {name}(generator, size), with a torch.Generator and the number of samples "
            f"of a lane: {error}"
        ) from None
