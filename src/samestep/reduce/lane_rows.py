"""Rows that all lanes of all ranks have computed, brought together in the order of the lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.distributed.collectives import Collectives, TorchCollectives
from samestep.errors import StepError
from samestep.pytree import leaves, map_leaves


class RowKind(NamedTuple):
    """The shape and kind that the rows of all lanes share."""

    per_sample: int
    """Rows per sample: one for each of its views."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class LaneRows:
    """Gathers what lanes have computed for their samples. Every rank makes the same calls."""

    def __init__(self, assignment: Sequence[range], collectives: Collectives, device: torch.device) -> None:
        self._assignment, self._collectives, self._device = assignment, collectives, device
        self._kinds: dict[str, RowKind] = {}
        self._containers: dict[str, Any] = {}
        """By name, what the tensors are in."""
        self._sent: dict[str, tuple[Tensor, Tensor]] = {}
        """By name, what was last handed to a collective: else its thread might be the one to free it."""

    def share_samples(self, mine: Mapping[int, int]) -> list[int]:
        """Return how many samples each lane of all ranks has in a step."""
        most = max(map(len, self._assignment))
        held = self._assignment[self._collectives.rank]
        own = torch.zeros(most, dtype=torch.int64)
        for place, lane in enumerate(held):
            own[place] = mine.get(lane, 0)
        every = self._all_gather(own, "numbers of samples").view(-1, most).tolist()
        return [count for row, lanes in zip(every, self._assignment, strict=True) for count in row[: len(lanes)]]

    def gather(self, name: str, samples: Sequence[int], mine: Mapping[int, Any]) -> Any:
        """Return the rows of all lanes, in their order, the same on every rank; they carry no gradient.

        Args:
            name: What they are; rows of one name have one kind in all steps.
            samples: What `share_samples` returned.
            mine: Of this rank's lanes that have samples, by lane: a tensor, or containers of them.

        Returns:
            A tensor, or the same containers.

        Raises:
            StepError: The rows are not all alike.
        """
        parts = {lane: leaves(value) for lane, value in mine.items()}
        for lane, found in parts.items():
            for leaf in found:
                if not isinstance(leaf, Tensor):
                    raise StepError(
                        f"{name} of lane {lane} holds a {type(leaf).__name__}: only tensors with a row "
                        "for each sample can be gathered"
                    )
        containers = self.container(name, mine)
        tensors = iter(
            [
                self._gather(f"{name}[{at}]" if at else name, samples, _column(parts, at))
                for at in range(len(leaves(containers)))
            ]
        )
        return map_leaves(lambda leaf: next(tensors), containers)

    def _gather(self, name: str, samples: Sequence[int], mine: Mapping[int, Tensor]) -> Tensor:
        kind = self._kind(name, samples, mine)
        rows = [samples[lane] * kind.per_sample for lane in range(len(samples))]
        by_rank = [sum(rows[lane] for lane in lanes) for lanes in self._assignment]
        own = [mine[lane].detach() for lane in sorted(mine)]
        if self._collectives.world == 1:
            return torch.cat(own)
        most = max(by_rank)
        if min(by_rank) == most:
            piece = torch.cat(own)
        else:
            piece = torch.zeros((most, *kind.shape), dtype=kind.dtype, device=self._device)
            if own:
                torch.cat(own, out=piece[: by_rank[self._collectives.rank]])
        # As bytes: not every backend knows every type.
        sent = self._all_gather(piece.reshape(-1).view(torch.uint8), name).to(self._device)
        every = sent.view(kind.dtype).view(-1, *kind.shape)
        if min(by_rank) == most:
            return every
        by_rank_and_row = every.view(-1, most, *kind.shape)
        parts = zip(by_rank_and_row, by_rank, strict=True)
        return torch.cat([part[:count] for part, count in parts])

    def container(self, name: str, mine: Mapping[int, Any]) -> Any:
        """Return the containers of rows of a name, with a 0 for each tensor; the same on every rank."""
        if name not in self._containers:
            # Once for each name: a rank without samples has nothing to look at.
            own = next(iter(mine.values()), None)
            bare = None if own is None else (map_leaves(lambda leaf: 0, own),)
            found = [given for given in self._collectives.gather(bare) if given is not None]
            self._containers[name] = found[0][0]
        return self._containers[name]

    def _kind(self, name: str, samples: Sequence[int], mine: Mapping[int, Tensor]) -> RowKind:
        found = {_kind_of(name, rows, samples[lane]) for lane, rows in mine.items()}
        known = self._kinds.get(name)
        if known is None:
            every = set().union(*self._collectives.gather(found))
            if len(every) != 1:
                raise StepError(
                    f"{name} of all lanes must have rows of one shape and type, as many for each "
                    f"sample, and not {_listed(every)}"
                )
            known = self._kinds[name] = every.pop()
        if found - {known}:
            raise StepError(f"{name} had rows of the kind {_listed({known})} and now {_listed(found - {known})}")
        return known

    def _all_gather(self, piece: Tensor, name: str) -> Tensor:
        collectives = self._collectives
        if not isinstance(collectives, TorchCollectives):
            return piece
        sent = piece.to(collectives.wire(self._device))
        every = sent.new_empty(collectives.world * sent.numel())
        self._sent[name] = sent, every
        work = collectives.all_gather(every, sent, name)
        with collectives.activity.waiting(name):
            work.wait()
        return every


def _column(parts: Mapping[int, Sequence[Tensor]], at: int) -> dict[int, Tensor]:
    return {lane: found[at] for lane, found in parts.items()}


def _kind_of(name: str, rows: Tensor, samples: int) -> RowKind:
    count = len(rows) if rows.dim() else 0
    if count == 0 or count % samples:
        raise StepError(
            f"{name} of a lane must have a row for each of its {samples} samples, or as many rows for "
            f"each; its shape is {tuple(rows.shape)}"
        )
    return RowKind(count // samples, tuple(rows.shape[1:]), rows.dtype)


def _listed(kinds: set[RowKind]) -> str:
    return ", ".join(sorted(f"{k.per_sample} x {k.shape} {str(k.dtype).removeprefix('torch.')}" for k in kinds))
