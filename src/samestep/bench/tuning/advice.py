"""Recommendations from figures. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from samestep.bench.report.targets import format_ratio
from samestep.bench.statistics import WORTH
from samestep.bench.tuning.lanes import LaneCosts
from samestep.bench.tuning.timed import Timed, is_faster, simplest_of_fast, speedup
from samestep.bench.tuning.variants import Layout
from samestep.errors import PlanError
from samestep.report.format import format_bytes

_USABLE = 0.9
"""Share of the memory: the rest is the system's, and for what a run holds only now and then."""


@dataclass(frozen=True)
class Advice:
    """About one setting."""

    topic: str
    text: str
    """The recommendation, with the figures behind it."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Config values that differ from the config's own."""
    another_run: bool = False
    """Whether these values change what the training computes."""
    measurable: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return asdict(self)


def _not_measured(topic: str, why: str) -> Advice:
    return Advice(topic, f"not measurable here: {why}", measurable=False)


def best_layout(tried: Sequence[tuple[Layout, Timed]]) -> tuple[Layout, Timed]:
    """Return the fewest ranks, and of these the fewest threads, that nothing is clearly faster than.

    Raises:
        PlanError: if none could be measured.
    """
    in_order = sorted(tried, key=lambda one: (one[0].ranks, one[0].threads or 0))
    if all(timed.failed for _, timed in in_order):
        raise PlanError(f"no step could be measured: {in_order[0][1].failed}")
    best = simplest_of_fast([timed for _, timed in in_order])
    return next((layout, timed) for layout, timed in in_order if timed is best)


def advise_layout(tried: Sequence[tuple[Layout, Timed]], configured: object, same: str) -> tuple[Layout, Advice]:
    """Ranks and the threads of each.

    Args:
        tried: What was measured; the first is what others are compared with.
    """
    layout, best = best_layout(tried)
    first, base = tried[0]
    text = f"{layout.label}: {best.shown} a step"
    if layout != first and not base.failed:
        text += f", {format_ratio(speedup(best, base))} as fast as {first.label}"
    elif len(tried) > 1:
        text += f"; no other of {len(tried)} ways is {WORTH:g} times as fast"
    if layout.ranks > 1:
        text += f". Start it with: samestep launch CONFIG --nproc {layout.ranks}"
    # `auto` is one thread where every bit must be the same on all machines.
    now = configured if configured != "auto" else 1 if same == "bits" else None
    overrides: dict[str, Any] = {}
    if layout.threads is not None and layout.threads != now:
        overrides["distributed.threads_per_rank"] = layout.threads
    changes = bool(overrides) and same == "bits"
    return layout, Advice("ranks and threads", text, overrides, changes)


def advise_lanes(found: Sequence[Timed], configured: int, why_not: str = "") -> Advice:
    """Return the number of lanes, by the rule of `samestep tune lanes`."""
    topic = "lanes"
    if why_not:
        return _not_measured(topic, why_not)
    best = LaneCosts(configured, found).best
    overrides = {} if best.lanes == configured else {"lanes": best.lanes}
    return Advice(topic, f"{best.lanes}: {best.why}", overrides, bool(overrides))


def advise_workers(found: Mapping[int, Timed], configured: int) -> Advice:
    """Loader workers of a rank: the fewest that nothing is clearly faster than."""
    in_order = [found[count] for count in sorted(found)]
    best = simplest_of_fast(in_order)
    count = next(number for number, one in found.items() if one is best)
    least = in_order[0]
    if count > min(found):
        gain = format_ratio(speedup(best, least))
        text = f"{count}: {best.shown} a step, {gain} as fast as with {min(found)}: data is a bottleneck"
    else:
        text = f"{count}: {best.shown} a step; more workers ({', '.join(map(str, sorted(found)[1:]))}) are not faster"
    overrides = {} if count == configured else {"loader.workers": count}
    return Advice("loader workers", text, overrides)


def advise_precision(base: Timed, other: Timed, configured: str, name: str) -> Advice:
    """Return the config's precision, or another one."""
    topic = "precision"
    if other.failed:
        return _not_measured(topic, f"{name}: {other.failed}")
    gain = format_ratio(speedup(other, base))
    if is_faster(other, base):
        text = f"{name}: {other.shown} a step, {gain} as fast as {configured}"
        return Advice(topic, text, {"precision": name}, another_run=True)
    return Advice(topic, f"{configured}: {base.shown} a step; {name} is {gain} as fast")


def advise_graph(base: Timed, without: Timed | None, why_not: str) -> Advice:
    """Return whether steps are replayed as CUDA graphs."""
    topic = "CUDA graphs"
    if without is None:
        return _not_measured(topic, why_not)
    if without.failed:
        return _not_measured(topic, without.failed)
    if is_faster(without, base):
        gain = format_ratio(speedup(without, base))
        text = f"off: {without.shown} a step, {gain} as fast as with graphs"
        return Advice(topic, text, {"speed.graph": False})
    gain = format_ratio(speedup(base, without))
    return Advice(topic, f"as configured: {base.shown} a step, {gain} as fast as without graphs")


def advise_shard(shard: str, failed: Mapping[str, str], peak: int | None, memory: int | None) -> Advice:
    """Return whether ranks share out optimizer states, or weights as well: the first way that fits.

    Args:
        shard: The first value of `distributed.shard` with which a step could be measured.
        failed: Why it could not with the values before.
    """
    held = "" if peak is None else f"a rank holds {format_bytes(peak)}"
    if held and memory is not None:
        held += f" of {format_bytes(memory)}"
    reasons = [f"{value} does not fit: {why}" for value, why in failed.items()]
    text = f"{shard}: {'; '.join(filter(None, [held, *reasons])) or 'a step fits into memory'}"
    return Advice("sharding", text, {"distributed.shard": shard} if failed else {})


def advise_batch(found: Sequence[Timed], memory: int | None) -> Advice:
    """Return what a larger global batch would bring; never an override, since it is another training.

    Args:
        found: The config's own first, then larger ones; on one rank.
    """
    base, *larger = found
    if base.failed:
        return _not_measured("global batch", base.failed)
    measured = [one for one in larger if not one.failed]
    parts = [f"{base.global_batch} has {base.rate.median:.4g} samples a second on one rank"]
    parts += [f"{one.global_batch} has {format_ratio(speedup(one, base))} as many" for one in measured]
    parts += [f"{one.label} does not fit: {one.failed}" for one in larger if one.failed]
    most = largest_batch([base, *measured], memory)
    if most is not None:
        parts.append(f"memory is enough for about {most} on one rank")
    worth = [one for one in measured if is_faster(one, base)]
    if worth:
        parts.append("a larger one is another training: choose it yourself, with its learning rate")
    return Advice("global batch", "; ".join(parts))


def largest_batch(found: Sequence[Timed], memory: int | None) -> int | None:
    """Return how many samples fit, by a line through the peaks of several batches; None if none follows."""
    known = [(one.global_batch, one.peak_bytes) for one in found if one.peak_bytes is not None]
    if memory is None or len(known) < 2:
        return None
    (few, low), (many, high) = known[0], known[-1]
    growth = (high - low) / (many - few)
    if growth <= 0:
        return None
    return max(many, int(few + (_USABLE * memory - low) / growth))
