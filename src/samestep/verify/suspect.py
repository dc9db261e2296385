"""The first tensor that differs between two traces, or between the ranks of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from samestep.train.trace import AFTER, BEFORE, LANE, SUM, Entry
from samestep.verify.differences import relative_distance, ulp_distance

Trace = Sequence[Sequence[Entry]]
"""The entries of every rank."""
Key = tuple[str, str, int]

_REASONS = {
    "samples": "the lane got other samples: an order, or a dataset, that depends on the process",
    "batch": "the same samples gave other data: a dataset or a collate function that depends on the "
    "process, draws from its own generator, or counts",
    "input": "code between the modules, such as in a forward of its own, gave something else",
    "output": "the same input gave another output: it draws from its own generator or seeds one, or "
    "keeps something between calls, such as a counter or a cache",
    "loss": "the same outputs gave another loss: look at the code of the loss",
    "buffer": "the forward pass changes it by something else than the lane's batch",
    "gradient": "the same loss gave another gradient: an operation whose backward pass is not deterministic, or a hook",
}
_REASONS_OF_SUMS = {
    "gradient": "each lane's gradient is the same, their sum is not: something else adds them up",
    "buffer": "each lane's change is the same, the joined buffer is not",
}
_BEFORE = (
    "it differs before the step: the objects are not made the same way (a model that is made before "
    "samestep.start does not follow from the seed), or a checkpoint does not hold all of their state"
)
_AFTER = (
    "the same gradients gave another state: the optimizer, or what follows it, draws from its own "
    "generator or depends on the process"
)


@dataclass(frozen=True)
class Suspect:
    """The first tensor that differs, where, and by how much."""

    step: int
    lane: int | None
    """None for what belongs to no lane: sums, and the state."""
    tensor: str
    """In words, such as `output of model.dropout`."""
    kind: str
    name: str
    order: int
    """Its place among the tensors of the lane, or of its part of the step."""
    between: str
    """Which runs, or which ranks of one run, differ."""
    reason: str
    ulp: int | None = None
    relative: float | None = None

    def __str__(self) -> str:
        where = f"step {self.step}" + ("" if self.lane is None else f", lane {self.lane}")
        size = "" if self.ulp is None else f": {self.ulp:,} ULP, {self.relative:.2g} relative"
        return f"first difference: {where}, {self.tensor}{size} ({self.between}). {self.reason[0].upper()}{self.reason[1:]}"


def find_suspect(labels: tuple[str, str], first: Trace, second: Trace) -> Suspect | None:
    """Return the first tensor that two runs of the same steps, or the ranks of one, do not have in common."""
    steps = sorted({entry.step for trace in (first, second) for rank in trace for entry in rank})
    for step in steps:
        for part in (BEFORE, LANE, SUM, AFTER):
            if part == LANE:
                found = _in_lanes(labels, first, second, step)
            else:
                found = (
                    _between_ranks(labels[0], first, step, part)
                    or _between_ranks(labels[1], second, step, part)
                    or _compared(f"{labels[0]} and {labels[1]}", _of(first[0], step, part), _of(second[0], step, part))
                )
            if found is not None:
                return found
    return None


def _in_lanes(labels: tuple[str, str], first: Trace, second: Trace, step: int) -> Suspect | None:
    lanes = [_by_lane(trace, step) for trace in (first, second)]
    for lane in sorted(lanes[0].keys() | lanes[1].keys()):
        ranks, entries = zip(*(found.get(lane, (None, {})) for found in lanes), strict=True)
        names = [f"{label}: rank {rank}" for label, rank in zip(labels, ranks, strict=True)]
        found = _compared("; ".join(names), *entries)
        if found is not None:
            return found
    return None


def _by_lane(trace: Trace, step: int) -> dict[int, tuple[int, dict[Key, Entry]]]:
    """Return the rank that drives each lane, and its entries of that lane."""
    found: dict[int, tuple[int, dict[Key, Entry]]] = {}
    for rank, entries in enumerate(trace):
        for entry in entries:
            if entry.step == step and entry.part == LANE and entry.lane is not None:
                found.setdefault(entry.lane, (rank, {}))[1][entry.key] = entry
    return found


def _between_ranks(label: str, trace: Trace, step: int, part: int) -> Suspect | None:
    own = _of(trace[0], step, part)
    for rank, entries in enumerate(trace[1:], 1):
        # What only rank 0 holds, such as an EMA of policy rank0, is no difference.
        theirs = _of(entries, step, part)
        shared = {key: entry for key, entry in own.items() if key in theirs}
        found = _compared(f"{label}: ranks 0 and {rank}", shared, theirs)
        if found is not None:
            return found
    return None


def _of(entries: Sequence[Entry], step: int, part: int) -> dict[Key, Entry]:
    return {entry.key: entry for entry in entries if (entry.step, entry.part) == (step, part)}


def _compared(between: str, left: Mapping[Key, Entry], right: Mapping[Key, Entry]) -> Suspect | None:
    for entry in _in_order(left, right):
        pair = left.get(entry.key), right.get(entry.key)
        if pair[0] is None or pair[1] is None:
            return _suspect(entry, between, only=True)
        if pair[0].digest != pair[1].digest:
            return _suspect(entry, between, other=pair[1])
    return None


def _in_order(left: Mapping[Key, Entry], right: Mapping[Key, Entry]) -> Iterator[Entry]:
    """Yield all entries, in the order of the first run; those of the second only in their place."""
    extra = [entry for key, entry in right.items() if key not in left]
    yield from sorted([*left.values(), *extra], key=lambda entry: entry.order)


def _suspect(entry: Entry, between: str, other: Entry | None = None, only: bool = False) -> Suspect:
    ulp = relative = None
    if other is not None and entry.dtype == other.dtype and entry.kind != "samples":
        a, b = entry.values(), other.values()
        if a.shape == b.shape and (a.is_floating_point() or a.is_complex()):
            distance = ulp_distance(a, b)
            # None: what differs is not among the elements that were kept.
            ulp, relative = (distance, relative_distance(a, b)) if distance else (None, None)
    tensor = _in_words(entry) + (", which only one of them computes" if only else "")
    return Suspect(
        entry.step, entry.lane, tensor, entry.kind, entry.name, entry.order, between, _reason(entry), ulp, relative
    )


def _in_words(entry: Entry) -> str:
    name = entry.name + (f", call {entry.call + 1}" if entry.call else "")
    if entry.part == SUM:
        return f"{entry.kind} {name} of all lanes"
    words = {
        "samples": "ids of the samples",
        "batch": f"tensor {name} of the input batch",
        "loss": "count of the loss" if entry.name else "loss",
        "state": f"{name} {'before the step' if entry.part == BEFORE else 'after the update'}",
        "buffer": f"buffer {name} after forward",
        "gradient": f"gradient of {name} (order {entry.order})",
    }
    return words.get(entry.kind, f"{entry.kind} of {name} (order {entry.order})")


def _reason(entry: Entry) -> str:
    if entry.part == SUM:
        return _REASONS_OF_SUMS[entry.kind]
    if entry.kind == "state":
        return _BEFORE if entry.part == BEFORE else _AFTER
    return _REASONS[entry.kind]
