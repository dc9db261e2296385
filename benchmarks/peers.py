"""What a training step costs with samestep and with other libraries.

    python benchmarks/peers.py [--workload mlp|gpt|both] [--variants a,b] [--rounds N]
                               [--optimizer fused|default] [--dropout P] [--device cpu|cuda]
                               [--quick] [--json FILE]

Every variant trains the same model from the same weights on the same batches (contest.py):
AdamW, gradients clipped at norm 1, the loss logged every 10 steps by the variant's own logger,
no evaluation, no checkpoints, no progress bar. All run in one process and take turns: a round is
some steps of each, and the device is synchronized before and after. Trainers that own their loop
run it in a thread, which is released for a round's steps; a second hand-written loop does so too,
and its ratio, which should be 1, shows what that costs and how far to trust the rest.

`samestep` and `samestep-graph` train the batch as one lane, `samestep-default` as the 8 lanes that a new
user's config has, with everything else default too. Each variant has its own settings of torch in
its turns: samestep chooses deterministic kernels, which the others are not to pay for.

Without dropout all must have learned the same after the first round. The table shows each loss, and
a variant that trained something else is reported, since its time means nothing. `--quick` runs
fewer steps and a tiny GPT.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from comparison import BARE_GRAPH, HAND_WRITTEN, Compared, Goal, Settings, compared, time_all
from contest import Contest, open_contest, workload_of
from libraries import open_accelerate, open_fabric, open_hf_trainer, open_lightning
from measuring import add_device_option, common_options, device_of, machine, on_ranks, rounds_of, show, write_json
from rich.table import Table
from torch import Tensor
from variants import (
    TOLERANCE,
    LoopContext,
    Reached,
    Samestep,
    open_bare_graph,
    open_hand_written,
    open_in_thread,
    reached_by,
)

from samestep.bench.baselines import Advance
from samestep.optim.kernels import allow_deterministic_products

ROUNDS = 20
CONTROL = "hand-written, in a thread"
EAGER, GRAPH, DEFAULT = "samestep", "samestep-graph", "samestep-default"


@dataclass(frozen=True)
class Entry:
    """A way to open a variant, and its requirements."""

    open: Callable[[LoopContext], Advance]
    packages: tuple[str, ...] = ()
    gpu: bool = False

    def lacks(self, device: torch.device) -> str | None:
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        return "needs a GPU" if self.gpu and device.type != "cuda" else None


ENTRIES = {
    HAND_WRITTEN: Entry(open_hand_written),
    CONTROL: Entry(open_in_thread),
    # Before all graphs: some clear cuBLAS's workspaces when they start, which captured products use.
    "accelerate": Entry(open_accelerate, ("accelerate",)),
    "fabric": Entry(open_fabric, ("lightning",)),
    "lightning": Entry(open_lightning, ("lightning",)),
    "hf-trainer": Entry(open_hf_trainer, ("transformers", "accelerate")),
    EAGER: Entry(Samestep(lanes=1, graph=False).open),
    GRAPH: Entry(Samestep(lanes=1, graph=True).open, gpu=True),
    DEFAULT: Entry(Samestep().open),
    BARE_GRAPH: Entry(open_bare_graph, gpu=True),
}
ALWAYS = (HAND_WRITTEN, CONTROL)
"""The reference of all others, and the control that shows how good the comparison is."""


# -- measuring -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerSettings(Settings):
    fused: bool
    dropout: float


@dataclass(frozen=True)
class Result(Compared):
    """A variant's time, and what it has learned."""

    loss_before: float
    """On the same batch, before the first round."""
    apart: float
    """Distance of its weights from the hand-written loop's, relative to how far those moved."""


def measure(settings: PeerSettings) -> tuple[list[Result], dict[str, str]]:
    """Measure all variants of one workload in this process; report which failed, and why."""
    quieten()
    allow_deterministic_products(settings.device)
    workload = workload_of(settings.workload, settings.quick)
    contest = open_contest(workload, settings.device, settings.fused, settings.dropout)
    openers = {name: ENTRIES[name].open for name in settings.variants}
    learned = time_all(contest, openers, settings.rounds, lambda loop: reached_by(contest, loop.model))
    drops = settings.workload == "gpt" and settings.dropout > 0
    return results_of(contest, learned[0], learned[1], drops), learned[2]


def quieten() -> None:
    """Silence advice on data workers and the like, which does not apply here."""
    warnings.filterwarnings("ignore", module="lightning")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def results_of(
    contest: Contest, spent: Mapping[str, Tensor], reached: Mapping[str, Reached], drops: bool
) -> list[Result]:
    """Return a row for each; with dropout each draws its own masks, and no two agree."""
    workload, start = contest.workload, reached_by(contest, contest.initial)
    goals: dict[str, Goal] = {EAGER: (workload.goals.eager, HAND_WRITTEN), GRAPH: (workload.goals.graph, BARE_GRAPH)}
    if contest.on_gpu:  # on a CPU nothing runs side by side
        goals[DEFAULT] = (workload.goals.default, HAND_WRITTEN)
    expected = reached[HAND_WRITTEN]
    moved, fall = (expected.weights - start.weights).norm(), start.loss - expected.loss
    results = []
    for name in spent:
        times = compared(contest, spent, name, goals.get(name, (None, None)))
        loss, apart = reached[name].loss, (reached[name].weights - expected.weights).norm() / moved
        agrees = drops or abs(loss - expected.loss) <= TOLERANCE * abs(fall)
        results.append(Result(**times, loss=loss, agrees=agrees, loss_before=start.loss, apart=apart.item()))
    return results


# -- showing -------------------------------------------------------------------------------


def results_table(results: Sequence[Result]) -> Table:
    table = Table(title=f"A step of {results[0].workload}", title_justify="left")
    table.add_column("variant", no_wrap=True)
    for column in ("ms/step", "to hand-written", "95% range", "to bare graph", "goal", "CPU ratio", "loss", "apart"):
        table.add_column(column, justify="right")
    for result in results:
        cpu, apart = f"{result.cpu_ratio:.3f}", f"{result.apart:.1e}"
        table.add_row(*result.cells(), cpu, result.loss_cell(), apart)
    return table


def notes_on(results: Sequence[Result], left_out: Mapping[str, str]) -> list[str]:
    notes = [f"left out: {name} ({why})" for name, why in left_out.items()]
    for workload, before in {result.workload: result.loss_before for result in results}.items():
        notes.append(
            f"{workload}: the loss was {before:.4f} before the first round; the table shows the loss "
            "and the distance of the weights after it"
        )
    for result in disagreeing(results):
        notes.append(
            f"[red]{result.variant} trained something else[/] on {result.workload}: its loss is "
            f"{result.loss:.6f}. Its time means nothing until that is fixed"
        )
    return notes


def disagreeing(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if not result.agrees]


def facts_of(device: torch.device, options: Namespace) -> dict[str, Any]:
    libraries = sorted({name for entry in ENTRIES.values() for name in entry.packages})
    return {
        **machine(device),
        **{name: version(name) for name in libraries if importlib.util.find_spec(name)},
        "optimizer": f"AdamW ({options.optimizer})",
        "dropout": options.dropout,
    }


def options_of(arguments: Sequence[str] | None = None) -> Namespace:
    parser = common_options("What a step costs with samestep and with other libraries.", ROUNDS)
    add_device_option(parser)
    choices = [name for name in ENTRIES if name not in ALWAYS]
    parser.add_argument("--workload", choices=("mlp", "gpt", "both"), default="both")
    parser.add_argument(
        "--variants", default=",".join(choices), metavar="A,B",
        help=f"of {', '.join(choices)}; the hand-written loop always runs",
    )  # fmt: skip
    parser.add_argument("--optimizer", choices=("fused", "default"), default="fused")
    parser.add_argument("--dropout", type=float, default=0.0, help="in the GPT (default: 0)")
    options = parser.parse_args(arguments)
    options.variants = [*ALWAYS, *options.variants.split(",")]
    unknown = [name for name in options.variants if name not in ENTRIES]
    if unknown:
        parser.error(f"no variant is called {', '.join(unknown)}: there are {', '.join(choices)}")
    return options


def main() -> None:
    options = options_of()
    rounds, device = rounds_of(options, ROUNDS), device_of(options)
    # The HF Trainer would split its batches over all visible GPUs.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    requested = [name for name in ENTRIES if name in options.variants]
    lacks = {name: ENTRIES[name].lacks(device) for name in requested}
    left_out = {name: why for name, why in lacks.items() if why is not None}
    running = tuple(name for name in requested if name not in left_out)
    facts, fused = facts_of(device, options), options.optimizer == "fused"

    every: list[Result] = []
    all_well = True
    for key in ("mlp", "gpt") if options.workload == "both" else (options.workload,):
        settings = PeerSettings(key, options.quick, device, rounds, running, fused, options.dropout)
        results, failed = on_ranks(1, measure, settings)
        left_out.update(failed)
        every += results
        all_well = all_well and not failed and not disagreeing(results)
        show([results_table(results)], facts, rounds, notes_on(results, left_out))
        write_json(options.json, facts, every, left_out=left_out)
    if not all_well:
        sys.exit(1)


if __name__ == "__main__":
    main()
