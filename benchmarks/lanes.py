"""What lanes cost on a GPU: eager, as CUDA graphs, one after the other and side by side.

    python benchmarks/lanes.py [--workload mlp|conv|gpt|gpt-large|all] [--variants a,b]
                               [--rounds N] [--log-every N] [--device cpu|cuda] [--quick]
                               [--json FILE]

All train on the same batches, as in peers.py, in one process and interleaved: the hand-written loop
with the whole batch at once, a bare CUDA graph of that (the lower limit for one lane), and samestep:
the lines of the hand-written loop on a run (`loop`), and tasks with one lane, with the 8 lanes of its defaults, and
with 8 lanes at every width of `speed.parallel_lanes`. The hand-written loop and the bare graph have torch's default settings in
their turns, samestep has the deterministic kernels of `same: bits`. What these cost by themselves,
the loop and the graph show that run a second time with them.

Neither a graph nor lanes side by side may change a bit: after the first round, all of samestep with
as many lanes must have one hash of the weights; otherwise the exit status is 1. So it is if one
trained something else than the hand-written loop (not checked with BatchNorm, whose lanes are
another model). The goals are for an H200; a missed one does not change the exit status.

`--log-every 1000000` shows the bare loops, in which nobody reads a loss. `--quick` runs tiny models.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from comparison import BARE_GRAPH, HAND_WRITTEN, Compared, Goal, Settings, compared, time_all
from contest import LOG_EVERY, WORKLOADS, Contest, Workload, open_contest, workload_of
from measuring import add_device_option, common_options, device_of, machine, on_ranks, rounds_of, show, write_json
from rich.table import Table
from torch import Tensor
from variants import (
    TOLERANCE,
    LoopContext,
    Samestep,
    SamestepLoop,
    deterministic,
    open_bare_graph,
    open_hand_written,
    reached_by,
)

from samestep.bench.baselines import Advance
from samestep.config.schema import DEFAULT_LANES
from samestep.optim.kernels import allow_deterministic_products
from samestep.run.state_tensors import module_tensors
from samestep.train.record import hash_state

ROUNDS = 10
CONTROL = "hand-written, again"
FIXED_GRAPH = "bare-graph, deterministic"
BY_HAND: dict[str, Callable[[LoopContext], Advance]] = {
    HAND_WRITTEN: open_hand_written,
    CONTROL: open_hand_written,
    "hand-written, deterministic": deterministic(open_hand_written),
    BARE_GRAPH: open_bare_graph,
    FIXED_GRAPH: deterministic(open_bare_graph),
}
DEFAULT, ONE_EAGER, ONE_GRAPH = "default", "1-eager", "1-graph"
LOOP, ONE_LOOP = "loop", "1-loop"
WIDTHS = (1, 2, 4, 8)
OURS = {
    # First, since it chooses how many lanes run side by side by the memory that is free.
    DEFAULT: Samestep(),
    LOOP: SamestepLoop(),
    ONE_LOOP: SamestepLoop(lanes=1),
    "loop-eager": SamestepLoop(graph=False),
    ONE_EAGER: Samestep(lanes=1, graph=False),
    ONE_GRAPH: Samestep(lanes=1, graph=True),
    "8-eager": Samestep(lanes=8, graph=False),
    **{f"8-graph-{width}": Samestep(8, True, width) for width in WIDTHS},
}


def lanes_of(name: str) -> int | None:
    return OURS[name].lanes or DEFAULT_LANES if name in OURS else None


def needs_gpu(name: str) -> bool:
    return name in (BARE_GRAPH, FIXED_GRAPH) or (name in OURS and OURS[name].graph is True)


# -- measuring -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LaneSettings(Settings):
    log_every: int


@dataclass(frozen=True)
class Result(Compared):
    """A variant's time, and what it has learned."""

    lanes: int | None
    met: bool | None
    weights: str
    """A hash of the weights and buffers after the first round."""


@dataclass(frozen=True)
class Learned:
    """The state of a variant after its first round."""

    loss: float
    weights: str


def measure(settings: LaneSettings) -> tuple[list[Result], dict[str, str]]:
    """Measure these variants in this process; report which failed, and why."""
    allow_deterministic_products(settings.device)
    workload = workload_of(settings.workload, settings.quick)
    contest = open_contest(workload, settings.device, log_every=settings.log_every)
    openers = {name: BY_HAND[name] if name in BY_HAND else OURS[name].open for name in settings.variants}
    spent, learned, failed = time_all(contest, openers, settings.rounds, learned_by)
    before = reached_by(contest, contest.initial).loss
    return results_of(contest, spent, learned, before), failed


def learned_by(loop: LoopContext) -> Learned:
    loss = reached_by(loop.contest, loop.model).loss
    return Learned(loss, hash_state(module_tensors(loop.model)))


def results_of(
    contest: Contest, spent: Mapping[str, Tensor], learned: Mapping[str, Learned], before: float
) -> list[Result]:
    """Return a row for each; `before` is the loss of the weights that all began with."""
    workload, expected = contest.workload, learned[HAND_WRITTEN].loss
    fall = abs(before - expected)
    results = []
    for name in spent:
        goal = goal_of(name, workload) if contest.on_gpu else (None, None)
        times = compared(contest, spent, name, goal)
        loss, weights = learned[name].loss, learned[name].weights
        agrees = not workload.comparable or abs(loss - expected) <= TOLERANCE * fall
        row = Result(**times, loss=loss, agrees=agrees, lanes=lanes_of(name), met=None, weights=weights)
        met = None if row.goal is None or row.judged is None else row.judged <= row.goal
        results.append(replace(row, met=met))
    return results


def goal_of(name: str, workload: Workload) -> Goal:
    """Return the highest ratio that is wanted, and to what."""
    goals = workload.goals
    return {
        DEFAULT: (goals.default, HAND_WRITTEN),
        ONE_EAGER: (goals.eager, HAND_WRITTEN),
        ONE_GRAPH: (goals.graph, BARE_GRAPH),
        LOOP: (goals.loop, HAND_WRITTEN),
        ONE_LOOP: (goals.one_loop, HAND_WRITTEN),
    }.get(name, (None, None))


# -- showing -------------------------------------------------------------------------------


def results_table(results: Sequence[Result]) -> Table:
    table = Table(title=f"A step of {results[0].workload}", title_justify="left")
    table.add_column("variant", no_wrap=True)
    for column in ("ms/step", "to hand-written", "95% range", "to bare graph", "goal", "loss", "weights"):
        table.add_column(column, justify="right")
    for result in results:
        weights = "" if result.lanes is None else result.weights[:8]
        table.add_row(*result.cells(), result.loss_cell(), weights)
    return table


def notes_on(results: Sequence[Result], left_out: Mapping[str, str]) -> list[str]:
    notes = [f"left out: {name} ({why})" for name, why in left_out.items()]
    for lanes, hashes in hashes_of(results).items():
        if len(hashes) > 1 and len(set(hashes.values())) == 1:
            notes.append(f"{lanes} lanes: one hash for {', '.join(hashes)}")
        elif len(hashes) > 1:
            found = ", ".join(f"{name} {weights}" for name, weights in hashes.items())
            notes.append(f"[red]{lanes} lanes: not the same bits:[/] {found}")
    for result in results:
        if not result.agrees:
            notes.append(
                f"[red]{result.variant} trained something else[/] than the hand-written loop: its "
                f"loss is {result.loss:.6f}. Its time means nothing until that is fixed"
            )
    return notes


def hashes_of(results: Sequence[Result]) -> dict[int, dict[str, str]]:
    """By number of lanes, the hash of each variant's weights."""
    found: dict[int, dict[str, str]] = {}
    for result in results:
        if result.lanes is not None:
            found.setdefault(result.lanes, {})[result.variant] = result.weights
    return found


def is_sound(results: Sequence[Result]) -> bool:
    """Return whether all trained what they should, to the bit where that is promised."""
    one_hash = all(len(set(hashes.values())) == 1 for hashes in hashes_of(results).values())
    return one_hash and all(result.agrees for result in results)


def options_of(arguments: Sequence[str] | None = None) -> Namespace:
    parser = common_options("What lanes cost on a GPU.", ROUNDS)
    add_device_option(parser)
    parser.add_argument("--workload", choices=(*WORKLOADS, "all"), default="all")
    parser.add_argument(
        "--variants", default=",".join(OURS), metavar="A,B", help=f"of {', '.join(OURS)}; those by hand always run"
    )
    parser.add_argument(
        "--log-every", type=int, default=LOG_EVERY, metavar="N",
        help=f"steps between two readings of the loss (default: {LOG_EVERY})",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    unknown = [name for name in options.variants if name not in OURS]
    if unknown:
        parser.error(f"no variant is called {', '.join(unknown)}: there are {', '.join(OURS)}")
    if options.log_every < 1:
        parser.error(f"--log-every is {options.log_every}: use at least 1")
    return options


def main() -> None:
    options = options_of()
    rounds, device = rounds_of(options, ROUNDS), device_of(options)
    requested = [name for name in (*BY_HAND, *OURS) if name in (*BY_HAND, *options.variants)]
    on_gpu = device.type == "cuda"
    running = [name for name in requested if on_gpu or not needs_gpu(name)]
    left_out = {name: "needs a GPU" for name in requested if name not in running}
    facts = {**machine(device), "log_every": options.log_every}

    every: list[Result] = []
    all_well = True
    for key in WORKLOADS if options.workload == "all" else (options.workload,):
        results: list[Result] = []
        for part in parts_of(workload_of(key, options.quick), running):
            settings = LaneSettings(key, options.quick, device, rounds, part, options.log_every)
            measured, failed = on_ranks(1, measure, settings)
            seen = {result.variant for result in results}
            results += [result for result in measured if result.variant not in seen]
            left_out.update(failed)
            all_well = all_well and not failed
        results.sort(key=lambda result: requested.index(result.variant))
        every += results
        all_well = all_well and is_sound(results)
        show([results_table(results)], facts, rounds, notes_on(results, left_out))
        write_json(options.json, facts, every, left_out=left_out)
    if not all_well:
        sys.exit(1)


def parts_of(workload: Workload, running: Sequence[str]) -> list[tuple[str, ...]]:
    """Return who shares a process: those by hand, opened last, and as many of samestep's as fit."""
    by_hand = [name for name in running if name in BY_HAND]
    ours = [name for name in running if name in OURS]
    starts = range(0, len(ours), workload.together)
    return [(*ours[start : start + workload.together], *by_hand) for start in starts]


if __name__ == "__main__":
    main()
