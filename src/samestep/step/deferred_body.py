"""The body of a loop as one CUDA graph: its operations are put off until the backward pass.

A body mostly does the same in every step. Once its operations are known, each of them is compared with what the last
step did, and only noted; the backward pass then replays all of them, for all lanes, as a graph. Where a body does
something else, or looks at a value, what was put off is run at once: that gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from samestep.data.batch import LaneBatch
from samestep.pytree import leaves, map_leaves, signature
from samestep.step.body_trace import (
    BodyTrace,
    Operation,
    Place,
    Run,
    State,
    filled,
    is_place,
    is_same,
    places_of,
    with_places,
)
from samestep.step.graph_nodes import reached_from
from samestep.step.graphs import GraphedSteps
from samestep.step.lane_passes import LanePasses
from samestep.step.lane_tensor import LaneSize, LaneTensor, LaneValue, lane_tensor
from samestep.step.loss_terms import LossValue
from samestep.step.torch_functions import changes_first

_SEEN_ALIKE = 2
"""Bodies in a row that did the same, after which the next one is put off."""
_CHANGES = 5
"""Times that a body may do something else before its operations are no longer put off."""
_METADATA = frozenset(
    ("size", "__get__", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex", "element_size")
)
"""Functions whose result follows from shapes and types."""


class KnownBodies:
    """The recorded bodies of a loop, over its steps."""

    def __init__(self, runner: GraphedSteps) -> None:
        self.runner = runner
        self._traces: dict[Any, BodyTrace] = {}
        self._changes = 0
        self.held: DeferredBody | None = None
        """The body whose values are still where its graph has put them."""

    def expected(self, key: Any) -> BodyTrace | None:
        """Return the trace of a body of this kind, if it has done the same before."""
        trace = self._traces.get(key)
        return trace if trace is not None and trace.times >= _SEEN_ALIKE else None

    def learn(self, key: Any, trace: BodyTrace) -> None:
        """Take what a body has done."""
        known = self._traces.get(key)
        if known is not None and known.does(trace):
            known.times += 1
            return
        if known is not None:
            self.forget(key, "what it does")
        self._traces[key] = trace

    def forget(self, key: Any, why: str) -> None:
        """A body did something else than was expected."""
        self._changes += 1
        self._traces.pop(key, None)
        if self.is_over:
            self.say(f"{why} changes from step to step")

    def say(self, why: str) -> None:
        """Tell once why a body is not captured."""
        self.runner.refuse("a loop's body", why)

    @property
    def is_over(self) -> bool:
        """Return whether bodies change too often to be put off."""
        return self._changes >= _CHANGES


class DeferredBody:
    """The operations of one body up to its first backward pass: noted, or put off."""

    def __init__(
        self,
        known: KnownBodies,
        batches: Sequence[LaneBatch],
        device: torch.device,
        apart: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._apart = apart
        self._known, self._batches, self._device = known, list(batches), device
        self._lanes = tuple(batch.lane for batch in batches)
        self._key = tuple((batch.lane, signature(batch.data)) for batch in batches)
        self._expected = None if known.is_over else known.expected(self._key)
        self._noted = BodyTrace(device.type)
        self._made: list[tuple[Place, ReferenceType[LaneTensor]]] = []
        self._why = "it changes from step to step" if known.is_over else ""
        """Why the body is not noted any further; empty if it is."""
        self._put_off: list[tuple[State, Any, Run]] = []
        """What was put off, with its arguments: reading the batches, then the operations."""
        self.is_put_off = self._expected is not None

    # -- operations ------------------------------------------------------------------------

    def batch(self, read: Callable[[], Any]) -> Any:
        """Return the lanes' batches; `read` brings them to the device."""
        if not self.is_put_off:
            return self._numbered(-1, read())
        self._put_off.append((State(True, None), ((), {}), lambda *_: read()))
        places = (Place(-1, leaf) for leaf in count())

        def pending(leaf: Any) -> Any:
            place = next(places)
            return self._placeholder(place) if isinstance(leaf, Tensor) else leaf

        return map_leaves(pending, self._batches[0].data)

    def take(self, function: Any, args: Any, kwargs: Any, run: Run) -> Any:
        """Run an operation, or put it off if it is the expected one."""
        if self._why:
            return run(args, kwargs)
        given = with_places((args, dict(kwargs)))
        state = State(torch.is_grad_enabled(), self._autocast())
        if not self.is_put_off or self._expected is None:
            return self._note(function, given, state, run(args, kwargs))
        number, expected = len(self._put_off) - 1, self._expected.operations
        if number < len(expected) and _alike(expected[number], function, given, state):
            self._put_off.append((state, given, run))
            return map_leaves(self._placeholder, expected[number].result, is_place)
        self.run_now(_name(function))
        return run(args, kwargs)

    def _note(self, function: Any, given: Any, state: State, made: Any) -> Any:
        found = [leaf for leaf in leaves(made) if isinstance(leaf, LaneTensor)]
        if lanes_differ(made) or lanes_differ(given):
            self._why = "lanes differ in shape"
        elif not found and _name(function) not in _METADATA:
            self._why = f"{_name(function)} returns no tensor"
        elif changes_first(_name(function)):
            self._why = f"{_name(function)} changes a value in place"
        elif any(leaf.per_lane[0].device.type != self._device.type for leaf in found):
            self._why = f"{_name(function)} computes on another device"
        if self._why:
            return made
        numbered = self._numbered(len(self._noted.operations), made)
        self._noted.operations.append(Operation(function, given, state, with_places(numbered)))
        return numbered

    def _numbered(self, operation: int, data: Any) -> Any:
        for leaf, value in enumerate(leaves(data)):
            if isinstance(value, LaneTensor):
                value.place = Place(operation, leaf)
                self._made.append((value.place, ref(value)))
        return data

    def _placeholder(self, place: Any) -> Any:
        if type(place) is not Place:
            return place
        made = lane_tensor(self._lanes, ())
        made.place, made.pending = place, self
        self._made.append((place, ref(made)))
        return made

    def _autocast(self) -> torch.dtype | None:
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    # -- running what was put off ----------------------------------------------------------

    def run_now(self, why: str, is_change: bool = True) -> None:
        """Run what was put off, at once: the body does something else, or needs a value."""
        if not self.is_put_off:
            return
        self.is_put_off, self._why = False, why or "it is not captured"
        if is_change:
            self._known.forget(self._key, why)
        found: dict[Place, Any] = {}
        for number, (state, given, run) in enumerate(self._put_off):
            with self._apart(), state.entered(self._device.type):
                result = run(*filled(given, found))
            found |= places_of(number - 1, leaves(result))
        for place, made in self._alive().items():
            made.fill(found[place].per_lane)
        self._put_off, self._made = [], []

    def materialize(self, value: LaneTensor) -> None:
        """Give a value that was put off its tensors."""
        if self.is_put_off:
            self.run_now("a value that it looks at before its backward pass")
            return
        assert self._expected is not None, "only what was put off is replayed"
        if value.place.operation < 0:
            rows = [leaves(batch.data)[value.place.leaf] for batch in self._batches]
            value.fill([row.to(self._device) for row in rows])
            return
        at = self._expected.kept.index(value.place)
        value.fill([self._expected.values[lane][at].clone() for lane in self._lanes])

    def take_values(self) -> None:
        """Before the graph's memory is written to again: copy what somebody still holds."""
        for _, weak in self._made:
            made = weak()
            if made is not None and made.pending is not None:
                self.materialize(made)
        self._made = []

    # -- the backward pass -----------------------------------------------------------------

    def learn(self, loss: LossValue) -> None:
        """The backward pass of an ordinary body comes: remember what it has done."""
        losses = [leaf for leaf in leaves(loss) if isinstance(leaf, LaneTensor)]
        alive = self._alive()
        why = self._why or _why_apart(losses, list(alive.values()))
        if why:
            self._known.say(why)
            return
        self._noted.loss = with_places(loss)
        self._noted.kept = tuple(sorted(place for place in alive if place.operation >= 0))
        self._known.learn(self._key, self._noted)

    def replays(self, passes: LanePasses, loss: LossValue) -> bool:
        """Replay the body with its backward pass, if it did what was expected and is captured."""
        expected, known = self._expected, self._known
        if not self.is_put_off or expected is None:
            return False
        whole = len(self._put_off) - 1 == len(expected.operations)
        kept = {place for place in self._alive() if place.operation >= 0} <= set(expected.kept)
        if not whole or not kept or not is_same(with_places(loss), expected.loss):
            self.run_now("what it does before its backward pass")
            return False
        if known.held is not None:
            known.held.take_values()
            known.held = None
        if not known.runner.reduce(passes, expected.loss_of):
            self.run_now("", is_change=False)
            return False
        self.is_put_off, known.held, self._put_off = False, self, []
        return True

    def _alive(self) -> dict[Place, LaneTensor]:
        """Return the values that the body still holds."""
        return {place: made for place, weak in self._made if (made := weak()) is not None}


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def lanes_differ(data: Any) -> bool:
    """Return whether something in it is no tensor and differs among lanes."""
    return any(isinstance(leaf, (LaneSize, LaneValue)) for leaf in leaves(data))


def _alike(operation: Operation, function: Any, given: Any, state: State) -> bool:
    return operation.state == state and is_same((operation.function, operation.args), (function, given))


def _why_apart(losses: Sequence[LaneTensor], alive: Sequence[LaneTensor]) -> str:
    """Return why the body needs its graph after the backward pass; empty if it does not."""
    reached = reached_from([loss.per_lane[0] for loss in losses])
    for made in alive:
        node = made.per_lane[0].grad_fn
        if node is not None and node not in reached:
            return "it holds a value that its loss has not reached, for another backward pass"
    return ""
