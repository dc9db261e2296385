"""Gathers measurements of all ranks on every rank: rows in the order of samples, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from samestep.distributed.context import RunContext
from samestep.errors import StepError
from samestep.evaluation.eval_batches import EvalShard
from samestep.step.lane_scope import NO_LANE
from samestep.step.lane_tensor import LaneTensor

Op = Literal["sum", "mean", "max", "min"]
Value = Tensor | float | int
"""What can be reduced."""


_ROWS, _LANES = 1 << 24, 1 << 20
"""More than a lane has rows, and more than there are lanes."""


def gather_lane_rows(context: RunContext, parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all lanes of all ranks: part by part, and of each part in the order of its lanes."""
    rows: list[Tensor] = []
    places: list[int] = []
    for number, part in enumerate(parts):
        pairs: Iterable[tuple[int, Tensor]] = [(0, part)]
        if isinstance(part, LaneTensor):
            pairs = zip(part.lanes, part.per_lane, strict=True)
        for lane, own in pairs:
            if lane != NO_LANE:
                first = (number * _LANES + lane) * _ROWS
                places += range(first, first + (len(own) if own.dim() else 0))
                rows.append(own)
    return gather_rows(context, rows, places)


def gather_rows(context: RunContext, rows: Tensor | Sequence[Tensor], places: Sequence[int] | None) -> Tensor:
    """Return the rows of all ranks, in the order of their samples.

    Args:
        places: The place of each among all ranks' rows; None if they are in the order of the ranks.
    """
    parts = [rows] if isinstance(rows, Tensor) else list(rows)
    if any(not isinstance(part, Tensor) or not part.dim() for part in parts):
        raise StepError(
            "run.gather takes tensors whose first dimension is samples, or a list of them with one for "
            "each batch: run.reduce is for single numbers"
        )
    mine = torch.cat([part.detach() for part in parts]).cpu() if parts else None
    ids = None if places is None else torch.tensor(places, dtype=torch.int64)
    if ids is not None and (0 if mine is None else len(mine)) != len(ids):
        raise StepError(
            f"run.gather got {0 if mine is None else len(mine)} rows, and the loop over run.eval_batches gave "
            f"this rank {len(ids)} samples: give one row for each"
        )
    gathered = context.gather((mine, ids))
    by_rank = [rows for rows, _ in gathered if rows is not None]
    kinds = {(rows.dtype, tuple(rows.shape[1:])) for rows in by_rank}
    if len(kinds) != 1:
        found = f"not {sorted(map(str, kinds))}" if kinds else "and no rank has any"
        raise StepError(f"run.gather needs rows of one type and shape on all ranks, {found}")
    every = torch.cat(by_rank)
    if places is not None:
        every = every[torch.argsort(torch.cat([ids for _, ids in gathered if ids is not None]))]
    return every.to(context.device)


def reduce_values(
    context: RunContext, value: Value | Sequence[Value], op: Op, share: EvalShard | None
) -> Tensor | float | int:
    """One value of all ranks; see `Run.reduce`.

    Args:
        share: The loop whose batches they are of; None for those of ranks.
    """
    if op not in get_args(Op):
        raise StepError(f"run.reduce has op={op!r}: it takes {', '.join(get_args(Op))}")
    single = isinstance(value, Tensor | float | int)
    mine = [value] if isinstance(value, Tensor | float | int) else list(value)
    places = [context.rank] if single else _places(mine, share)
    tensors = [_wide(item) for item in mine]
    idle = share is not None and not share.firsts
    by_rank = context.gather((list(zip(places, tensors, strict=True)), _kinds(mine), idle))
    if len(set().union(*(kinds for _, kinds, _ in by_rank))) > 1:
        # `sum(...)` over no batches is the number 0, whatever the others have added up.
        by_rank = [rank for rank in by_rank if not (rank[2] and rank[1] == {_NUMBER})]
    parts = sorted((part for rank, _, _ in by_rank for part in rank), key=lambda part: part[0])
    kinds = set().union(*(kinds for _, kinds, _ in by_rank))
    if len(kinds) != 1:
        raise StepError(f"run.reduce needs values of one kind on all ranks, not {sorted(map(str, kinds))}")
    if single and share is None and op == "sum" and context.world > 1:
        _warn_of_equal(context, [tensor for _, tensor in parts])
    joined = _joined([tensor for _, tensor in parts], op)
    dtype = kinds.pop()[0]
    if dtype is None:
        return joined.item()
    whole_mean = op == "mean" and not dtype.is_floating_point
    keeps = joined.dtype if whole_mean or dtype is torch.bool else dtype
    return joined.to(context.device, keeps)


def _warn_of_equal(context: RunContext, values: Sequence[Tensor]) -> None:
    """Warn of one value on all ranks, as after loops over a DataLoader that `run.prepare` did not get."""
    if not bool(values[0].any()) or not all(torch.equal(value, values[0]) for value in values):
        return
    shown = f" ({values[0].item():g})" if values[0].numel() == 1 else ""
    context.log.once(
        "equal values",
        f"Warning: run.reduce got the same value on all {context.world} ranks{shown}, and their sum is "
        f"{context.world} times that. If each rank has measured all of the data: give its DataLoader to "
        "run.prepare, and every sample counts once",
    )


def _places(mine: Sequence[Value], share: EvalShard | None) -> list[int]:
    if share is None:
        raise StepError(
            "run.reduce got a list, and there was no loop over run.eval_batches that it could be of: give "
            "one number or tensor"
        )
    if len(mine) != len(share.firsts):
        raise StepError(
            f"run.reduce got {len(mine)} values, and the loop over run.eval_batches gave this rank "
            f"{len(share.firsts)} batches: give one value for each"
        )
    return share.firsts


def _wide(value: Value) -> Tensor:
    """Return it in the widest type, on the host, where sums have the same bits everywhere."""
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    if value.is_complex():
        raise StepError("run.reduce got a complex tensor: give its real and imaginary parts")
    return value.detach().cpu().to(torch.float64 if value.is_floating_point() else torch.int64)


_NUMBER: tuple[None, tuple[int, ...]] = (None, ())
"""The kind of Python's own numbers."""


def _kinds(mine: Sequence[Value]) -> set[tuple[torch.dtype | None, tuple[int, ...]]]:
    return {(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else _NUMBER for value in mine}


def _joined(values: Sequence[Tensor], op: Op) -> Tensor:
    join: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"max": torch.maximum, "min": torch.minimum}
    add = join.get(op, torch.add)
    total = values[0]
    for value in values[1:]:
        total = add(total, value)
    return total.double() / len(values) if op == "mean" else total
