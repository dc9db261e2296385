"""A tensor of which each lane of this rank has its own: what a loop over the loader computes with.

A torch function that gets one runs once per lane on ordinary tensors, in lane order, and returns another. So
the body of a loop, written for a batch, computes for each lane what it would compute for that lane alone,
however many lanes a rank has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from samestep.errors import StepError
from samestep.pytree import leaves, map_leaves
from samestep.step.lane_scope import NO_LANE, LaneLeaves, Lanes, LaneScope, Pending, scope_of_body
from samestep.step.torch_functions import RANDOM, SUMS, changes_first, moves_statistics

_BASE = torch.empty(0, device="meta")


def _refused(what: str) -> Callable[..., Any]:
    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise StepError(
            f"{what} of {self!r}: each lane has its own value, and other ranks have other lanes. Take "
            "run.sum(value) or run.mean(value), which every rank calls; of a loss, what run.backward(loss) "
            "returns. Rows of all lanes: run.gather(value). A choice that is drawn once per step: random.random()"
        )

    return refuse


class LaneTensor(Tensor):
    """One tensor per lane of this rank. The loader of `run.prepare` yields them."""

    lanes: Lanes
    place: Any
    """Where in the body it was computed, if that is noted."""
    pending: Pending | None
    """What has put off its computation; None if it has its tensors."""
    batch_mean: Callable[[], Tensor] | None
    """Returns the mean over the global batch of a loss, after its backward pass."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_per_lane(func, args, kwargs or {})

    @property
    def per_lane(self) -> tuple[Tensor, ...]:
        """One tensor per lane."""
        if self.pending is not None:
            self.pending.materialize(self)
        return self._per_lane

    def fill(self, values: Sequence[Tensor]) -> None:
        """Take the tensors of what was put off."""
        self._per_lane, self.pending = tuple(values), None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Below torch's functions there is no lane: TorchScript, vmap, torch.tensor(x) and C++ come here.
        if func is torch.ops.aten.detach.default:
            return args[0].detach()  # Variable(x)
        raise StepError(
            f"{func} got a LaneTensor by a way that is no torch function (TorchScript, torch.func, an extension): use run.each_lane(function, x, ...)"
        )

    def backward(self, *_: Any, **options: Any) -> None:
        """Do what `run.backward(loss)` does."""
        _required_scope("backward").backward(self, **options)

    def item(self) -> Any:
        """Return the mean over the global batch of a loss, after its backward pass."""
        return _REFUSE_ITEM(self) if self.batch_mean is None else self.batch_mean().item()

    def __float__(self) -> float:
        return float(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.batch_mean is not None else repr(self)

    __int__ = __bool__ = __index__ = __complex__ = _refused("a number")
    tolist = numpy = __array__ = _refused("the values")
    __contains__ = _refused("a comparison")

    def __len__(self) -> int:
        sizes = {len(value) for value in self.per_lane}
        if len(sizes) > 1:
            raise StepError(_unequal("len(x)", sorted(sizes)))
        return sizes.pop()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if self.pending is not None:
            return f"LaneTensor({len(self.lanes)} lanes, not computed yet)"
        shape = list(self.per_lane[0].shape)
        return f"LaneTensor({len(self.lanes)} lane{'s' * (len(self.lanes) > 1)}, each {shape})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StepError(f"{self!r} cannot be saved or sent: save what run.sum, run.mean or run.gather returns")

    def __deepcopy__(self, memo: Any) -> LaneTensor:
        return lane_tensor(self.lanes, tuple(value.clone() for value in self.per_lane))


_REFUSE_ITEM = _refused("item()")


def lane_tensor(lanes: Lanes, values: Sequence[Tensor]) -> LaneTensor:
    """Return a tensor of these lanes."""
    made: LaneTensor = Tensor._make_subclass(LaneTensor, _BASE)
    made.lanes, made._per_lane = lanes, tuple(values)
    made.place = made.pending = made.batch_mean = None
    return made


def _unequal(what: str, values: Sequence[Any]) -> str:
    return (
        f"{what} differs among the lanes of this step ({', '.join(map(str, values[:4]))}), as in the last batch of "
        "an epoch. Use x.size(0) in torch functions, give the loader drop_last=True, or compute it in "
        "run.each_lane(function, ...)"
    )


def _number(name: str) -> Any:
    own = getattr(operator, name)
    return lambda self, *others: _per_lane(own, (self, *others), {}, draws=False)


def _reflected(name: str) -> Any:
    own = getattr(operator, name)
    return lambda self, other: _per_lane(own, (other, self), {}, draws=False)


class _OfLanes:
    """A value other than a tensor that differs among lanes: what is computed from it differs, too."""

    lanes: Lanes
    per_lane: tuple[Any, ...]

    def _refuse(self, *_: Any) -> Any:
        raise StepError(_unequal("a value that is used as one number", self.per_lane))

    def __repr__(self) -> str:
        return f"one per lane of {self.per_lane}"

    __bool__ = __int__ = __float__ = _refuse
    __hash__ = object.__hash__
    __add__, __radd__ = _number("add"), _reflected("add")
    __sub__, __rsub__ = _number("sub"), _reflected("sub")
    __mul__, __rmul__ = _number("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _number("truediv"), _reflected("truediv")
    __floordiv__, __rfloordiv__ = _number("floordiv"), _reflected("floordiv")
    __mod__, __rmod__, __neg__ = _number("mod"), _reflected("mod"), _number("neg")
    __eq__, __ne__ = _number("eq"), _number("ne")
    __lt__, __le__, __gt__, __ge__ = _number("lt"), _number("le"), _number("gt"), _number("ge")


class LaneSize(_OfLanes, int):
    """A length that differs among lanes, as in the last batch of an epoch.

    Torch takes only integers for sizes, so it is one: the largest, with which Python's own range and indexing run
    beyond the end of other lanes, and do not leave samples out.
    """


def lane_size(lanes: Lanes, values: Sequence[int]) -> LaneSize:
    """Return a length of these lanes."""
    body = scope_of_body.get()
    if body is not None:
        body.uneven = True
    made = int.__new__(LaneSize, max(values))
    made.lanes, made.per_lane = lanes, tuple(values)
    return made


class LaneValue(_OfLanes):
    """Anything else that differs among lanes, such as an object that a module has returned."""

    def __init__(self, lanes: Lanes, values: Sequence[Any]) -> None:
        self.lanes, self.per_lane = lanes, tuple(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return join(self.lanes, [getattr(value, name) for value in self.per_lane])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return each_lane(lambda call, *a, **k: call(*a, **k), (self, *args), kwargs)

    __index__ = __iter__ = __len__ = _OfLanes._refuse
    __getitem__ = _number("getitem")


_OWN = (LaneTensor, LaneSize, LaneValue)
OfLanes = LaneTensor | LaneSize | LaneValue


def lanes_of(data: Any) -> list[OfLanes]:
    """Return the values of lanes in some arguments."""
    found: list[OfLanes] = []
    for leaf in leaves(data):
        if type(leaf) in _OWN:
            found.append(leaf)
        elif type(leaf) is slice:
            found += lanes_of((leaf.start, leaf.stop, leaf.step))
    return found


def pick(data: Any, at: int, own: LaneLeaves | None = None) -> Any:
    """Return the arguments with the values of one lane.

    Args:
        data: With values of lanes.
        at: The place of the lane among the rank's.
        own: What lanes compute with in place of the parameters.
    """

    def of_lane(leaf: Any) -> Any:
        if type(leaf) in _OWN:
            return leaf.per_lane[at]
        if type(leaf) is slice:
            return slice(*pick((leaf.start, leaf.stop, leaf.step), at))
        if own is not None and isinstance(leaf, Tensor):
            return own.of(leaf, at)
        return leaf

    return map_leaves(of_lane, data)


def join(lanes: Lanes, outs: Sequence[Any]) -> Any:
    """Return the results of lanes as one: containers are kept, tensors become tensors of lanes."""
    first = outs[0]
    if isinstance(first, Tensor):
        return lane_tensor(lanes, outs)
    if first is None or isinstance(first, (bool, int, float, str, torch.dtype, torch.device)):
        if all(out == first for out in outs):
            return first
        return lane_size(lanes, outs) if type(first) is int else LaneValue(lanes, outs)
    if isinstance(first, torch.Size):
        if all(out == first for out in outs):
            return first
        return tuple(join(lanes, sizes) for sizes in zip(*outs, strict=True))
    rows = [leaves(out) for out in outs]
    if rows[0] == [first] or any(len(row) != len(rows[0]) for row in rows):
        return first if all(out is first for out in outs) else LaneValue(lanes, outs)
    columns = iter([join(lanes, column) for column in zip(*rows, strict=True)])
    return map_leaves(lambda _: next(columns), first)


def _required_scope(what: str) -> LaneScope:
    scope = scope_of_body.get()
    if scope is None:
        raise StepError(
            f"{what} of a LaneTensor outside of the loop over the loader that it comes from: do it in the "
            "loop's body, or take run.sum, run.mean or run.gather of it. A loop over validation data has no "
            "lanes; a second loader that trains is read beside the first: zip(loader, second)"
        )
    return scope


def call_per_lane(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a torch function that got a tensor of lanes, once per lane."""
    name = getattr(func, "__name__", "")
    if name == "_is_all_true":  # of torch.distributions, which then raises
        return torch.stack([func(value) for value in args[0].per_lane]).all()
    if args and type(args[0]) is not LaneTensor and changes_first(name):
        raise StepError(_changed_by_lanes(name, args[0]))
    if kwargs.get("out") is not None and type(kwargs["out"]) is not LaneTensor:
        raise StepError(_changed_by_lanes(f"{name}(out=...)", kwargs["out"]))
    if name == "batch_norm" and moves_statistics(func, args, kwargs):
        raise StepError(
            "a BatchNorm in training mode was called with lanes, and its module is not the run's: give "
            "run.prepare every module that the loop trains or calls in training mode, or call its .eval()"
        )
    result = _per_lane(func, args, kwargs, draws=name in RANDOM)
    first = args[0] if args else None
    if type(result) is not LaneTensor or type(first) is not LaneTensor or result.pending:
        return result
    return first if result.per_lane[0] is first.per_lane[0] else result  # changed in place


def _changed_by_lanes(name: str, changed: Any) -> str:
    what = "a parameter" if isinstance(changed, Parameter) else "an ordinary tensor"
    return (
        f"{name} changes {what} by values of lanes: it would be changed once per lane, of which ranks have different "
        "numbers. Change a tensor of lanes (x.new_zeros(...), torch.zeros_like(x)); change it by run.sum or run.mean of "
        "the value; begin a sum over steps with the number 0; draw noise for weights by torch.randn_like(weight)"
    )


def _per_lane(func: Any, args: Any, kwargs: Mapping[str, Any], *, draws: bool) -> Any:
    found = lanes_of((args, dict(kwargs)))
    lanes = found[0].lanes
    if any(value.lanes != lanes for value in found):
        return _with_missing(func, args, found)
    if draws:
        _required_scope("a random number")
    body = scope_of_body.get()
    if body is not None:
        return body.run_operation(func, args, kwargs, lanes, draws)
    return run_per_lane(func, args, kwargs, lanes, nullcontext(_no_scope))


def each_lane(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call any function once per lane of its arguments, on ordinary tensors."""
    found = lanes_of((args, dict(kwargs)))
    if not found:
        raise StepError("each_lane got no value of lanes: give it what the loader yields, or what follows from it")
    scope = _required_scope("each_lane").whole_lanes()
    return run_per_lane(func, args, kwargs, found[0].lanes, scope)


def _no_scope(lane: int) -> None:
    return None


def run_per_lane(
    func: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
    lanes: Lanes,
    scope: AbstractContextManager[Callable[[int], None]],
) -> Any:
    """Call a function once per lane, on ordinary tensors.

    Args:
        func: What to call.
        args: Its arguments; of values of lanes it gets the lane's.
        kwargs: By name.
        lanes: Of this rank.
        scope: What is entered around all calls; it yields what is called before each of them.
    """
    outs: list[Any] = []
    body = scope_of_body.get()
    own = None if body is None else body.leaves
    with torch._C.DisableTorchFunctionSubclass(), scope as enter:
        if body is not None:
            for shared in _with_graph((args, kwargs)):
                body.meets_graph(shared)
        rows = _rows(tuple(args), len(lanes), own)
        named = _rows(tuple(kwargs.values()), len(lanes), own) if kwargs else [()] * len(lanes)
        for lane, row, values in zip(lanes, rows, named, strict=True):
            enter(lane)
            outs.append(func(*row, **dict(zip(kwargs, values, strict=True))))
    return join(lanes, outs)


_FLAT = frozenset((Tensor, Parameter, int, float, bool, str, type(None), *_OWN))


def _rows(values: tuple[Any, ...], lanes: int, own: LaneLeaves | None) -> list[tuple[Any, ...]]:
    """Return the values of each lane; without a walk where they are no containers, as most are."""
    if not all(type(v) in _FLAT or (type(v) is tuple and {*map(type, v)} <= {int}) for v in values):
        return [pick(values, at, own) for at in range(lanes)]
    columns = [
        own.of_lanes(v) if own is not None and type(v) in (Tensor, Parameter)
        else v.per_lane if type(v) in _OWN else (v,) * lanes
        for v in values
    ]  # fmt: skip
    return list(zip(*columns, strict=True)) if columns else [()] * lanes


def _with_graph(data: Any) -> list[Tensor]:
    """Return the ordinary tensors in some arguments that were computed from weights."""
    return [leaf for leaf in leaves(data) if type(leaf) is Tensor and leaf.grad_fn is not None]


def _with_missing(func: Any, args: Any, found: Sequence[OfLanes]) -> Any:
    """Return a sum over steps, of which an epoch's last has fewer lanes."""
    name = getattr(func, "__name__", "")
    sides = [side for side in args[:2] if type(side) is LaneTensor]
    if name not in SUMS or len(sides) != 2:
        every = sorted({len(value.lanes) for value in found})
        raise StepError(
            f"{name} got values of different lanes ({' and '.join(map(str, every))}), as an epoch's last batch has "
            "fewer. Only sums go over several steps; else give the loader drop_last=True"
        )
    left, right = ({**dict(zip(side.lanes, side.per_lane, strict=True))} for side in sides)
    total = {
        lane: left[lane] + right[lane] if lane in left and lane in right else {**left, **right}[lane]
        for lane in sorted({*left, *right} - {NO_LANE}) or [NO_LANE]
    }
    return lane_tensor(tuple(total), list(total.values()))
