"""What a loss over the whole global batch costs, in time and memory.

    python benchmarks/contrastive.py [--quick] [--rounds N] [--worlds 1,2,4] [--device cpu|cuda]
                                     [--batches 256,8192] [--json FILE]

A transformer embeds samples, and a supervised contrast (`samestep.losses.supcon`) compares all of a
batch. All variants train on the same batches, in the same processes and interleaved, as in peers.py:

- `whole batch`: the loop by hand with one forward pass, on one process;
- `gathered graph`: what people write on several ranks: DistributedDataParallel, and an all-gather of
  the embeddings through which gradients flow back, so that each rank keeps the graph of its rows;
- `loss of each rank` (on one process: of each lane): contrasts only what is there. That is another loss,
  as its column shows: where training has led by the whole batch's loss;
- samestep with one lane a rank, with several whose activations are kept, and with several
  of which all but one are embedded twice; on a GPU also with the loss in pieces (`rows_at_once`).

On a GPU lanes have one size at all batches, and `MiB` is the most that a step allocates beyond what lies
there between steps. All but the third must reach the first's loss; otherwise the exit status is 1.
"""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contest import SEED
from contrast import Place, Scene
from measuring import (
    THREADS,
    Variant,
    add_device_option,
    common_options,
    cpu_ratio_to,
    device_of,
    goal_cell,
    machine,
    milliseconds,
    on_ranks,
    ratio_to,
    rounds_of,
    show,
    time_rounds,
    write_json,
)
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from variants import ENDLESS, TOLERANCE

import samestep
from samestep.bench.baselines import Advance, in_turns
from samestep.bench.scaling import KeepingSettings
from samestep.bench.workloads import HostData, collate_nothing
from samestep.losses import supcon
from samestep.optim.kernels import allow_deterministic_products, choose_kernels
from samestep.optim.precision import Precision
from samestep.train.loop import Training

ROUNDS = 10
READ_EVERY = 10
LEARNING_STEPS = 10
"""Steps before the losses are compared; memory is measured in the last of them."""
KEPT_GOAL, AGAIN_GOAL = 1.00, 1.35
GPU_BATCHES = (256, 512, 1024, 2048, 4096, 8192)
WHOLE, GATHERED, CONTROL = "whole batch", "gathered graph", "{}, again"
DETERMINISTIC = "{}, deterministic"
OWN_RANK, OWN_LANE = "loss of each rank", "loss of each lane"
ONE, KEPT, AGAIN = "samestep, 1 lane a rank", "samestep, kept", "samestep, recomputed"
PIECES = "samestep, recomputed, in pieces"
GOALS = {ONE: KEPT_GOAL, KEPT: KEPT_GOAL, AGAIN: AGAIN_GOAL, PIECES: AGAIN_GOAL}


# -- by hand -------------------------------------------------------------------------------


class GatheredRows(torch.autograd.Function):
    """An all-gather of rows; what all ranks want of a rank's rows is summed up on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return gathered(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (every,) = gradients
        every = every.contiguous()
        dist.all_reduce(every)
        return every.chunk(dist.get_world_size())[dist.get_rank()]


def gathered(rows: Tensor) -> Tensor:
    every = rows.new_empty(dist.get_world_size() * len(rows), *rows.shape[1:])
    dist.all_gather(list(every.chunk(dist.get_world_size())), rows.contiguous())
    return every


def of_own_rows(rows: Tensor, labels: Tensor) -> Tensor:
    return supcon(rows.float(), labels)


def of_all_rows(rows: Tensor, labels: Tensor) -> Tensor:
    return supcon(GatheredRows.apply(rows.float()), gathered(labels))


def by_hand(scene: Scene, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], pieces: int = 1) -> Variant:
    """Return the loop that people write; in `pieces`, each with a loss of its own."""
    if scene.place.world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = scene.optimizer(model)
    losses: list[float] = []
    for number, (x, y) in enumerate(scene.batches(), start=1):
        optimizer.zero_grad(set_to_none=True)
        for part, labels in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            with scene.autocast():
                rows = model(part)
            loss = loss_of(rows, labels) / pieces
            loss.backward()
        optimizer.step()
        if number % READ_EVERY == 0:
            losses.append(loss.item())
        yield


def deterministic(open_it: Callable[[], Variant], device: torch.device) -> Variant:
    """Return the same with the kernels of `same: bits`."""
    choose_kernels(Precision("fp32", "by hand", device), deterministic=True)
    yield from open_it()


# -- samestep ------------------------------------------------------------------------------


class Contrast(samestep.Task):
    """The same as a task."""

    def __init__(self, scene: Scene, model: nn.Module, rows_at_once: int | None) -> None:
        self._scene, self._model, self._rows_at_once = scene, model, rows_at_once

    def model(self) -> nn.Module:
        return self._model

    def train_data(self) -> HostData:
        return self._scene.dataset

    def order(self, dataset: HostData) -> Any:
        return samestep.orders.sequential(len(dataset))

    def collate(self, samples: Any) -> Any:
        return collate_nothing(samples)

    def optimizers(self, model: nn.Module) -> Optimizer:
        return self._scene.optimizer(model)

    def embed(self, model: nn.Module, batch: samestep.LaneBatch) -> Tensor:
        embeddings: Tensor = model(batch.x)
        return embeddings

    def batch_loss(self, embeddings: Any, batch: Any) -> Tensor:
        return supcon(embeddings, batch.y, rows_at_once=self._rows_at_once)


def by_samestep(
    scene: Scene, model: nn.Module, name: str, lanes: int, again: bool, at_once: int | None = None
) -> Variant:
    place = scene.place
    config = {
        "run_dir": str(scene.folder / name.replace(" ", "-")),
        "seed": SEED,
        "steps": ENDLESS,
        "global_batch": place.batch,
        "lanes": lanes,
        "precision": "bf16" if place.on_gpu else "fp32",
        "log_every": READ_EVERY,
        "contrastive": {"recompute": again},
        "checkpoint": {"enabled": False},
        "distributed": {"device": place.device.type, "threads_per_rank": THREADS},
    }
    with samestep.start(config) as run:
        yield from Training(run, Contrast(scene, model, at_once)).steps()


# -- measuring -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One variant, compared with the first of its place."""

    world: int
    batch: int
    variant: str
    lanes: int | None
    milliseconds: float
    ratio: float
    low: float
    high: float
    """`low` to `high` holds the true median ratio in about 95 of 100 runs."""
    cpu_ratio: float
    mebibytes: float | None
    """The most that a step allocates; None on a CPU."""
    rounds: int
    goal: float | None
    loss: float
    agrees: bool
    """Whether it learned what the first did, if it should."""


def openers(scene: Scene) -> dict[str, tuple[int | None, Callable[[nn.Module], Variant]]]:
    """By name: the lanes, and what trains a model."""
    place = scene.place
    several = place.world > 1
    first, loss_of = (GATHERED, of_all_rows) if several else (WHOLE, of_own_rows)
    lanes, cuts = place.batch // place.lane, 1 if several else place.batch // place.lane

    def ours(name: str, lanes: int, **values: Any) -> Any:
        return lanes, lambda model: by_samestep(scene, model, name, lanes, **values)

    def hand(loss: Callable[[Tensor, Tensor], Tensor], pieces: int = 1) -> Any:
        return None, lambda model: by_hand(scene, model, loss, pieces)

    found = {first: hand(loss_of), CONTROL.format(first): hand(loss_of)}
    if place.on_gpu:
        fixed = partial(by_hand, scene, loss_of=loss_of)
        found[DETERMINISTIC.format(first)] = (None, lambda model: deterministic(partial(fixed, model), place.device))
    found[OWN_RANK if several else OWN_LANE] = hand(of_own_rows, cuts)
    found[ONE] = ours(ONE, place.world, again=False)
    found[KEPT] = ours(KEPT, lanes, again=False)
    found[AGAIN] = ours(AGAIN, lanes, again=True)
    if place.on_gpu:
        found[PIECES] = ours(PIECES, lanes, again=True, at_once=place.lane)
    return found


def measure_all(places: Sequence[Place], rounds: int) -> tuple[list[Result], list[str]]:
    """Return all places of this process, or of this rank and the others; and who does not fit there."""
    results: list[Result] = []
    notes: list[str] = []
    for place in places:
        measured, too_large = measure(place, rounds)
        results += measured
        notes += [f"does not fit: {name} at {place.batch} samples" for name in too_large]
        leave_memory(place)
    return results, notes


def measure(place: Place, rounds: int) -> tuple[list[Result], list[str]]:
    """Return all variants of a place; and who does not fit."""
    allow_deterministic_products(place.device)
    turns: dict[str, Callable[[], None]] = {}
    peaks: dict[str, float | None] = {}
    losses: dict[str, float] = {}
    too_large: list[str] = []
    with ExitStack() as stack:
        scene = Scene(place, stack)
        before = scene.loss(scene.model())
        entries = openers(scene)
        for name, (_, open_it) in entries.items():
            model = scene.model()
            advance = KeepingSettings(partial(in_turns, open_it(model), stack))
            try:
                peaks[name] = learn(advance, place)
                turns[name], losses[name] = partial(advance, place.steps), scene.loss(model)
            except (torch.OutOfMemoryError, samestep.errors.OutOfMemory):
                too_large.append(name)
            leave_memory(place)
        gc.freeze()
        spent = time_rounds(turns, rounds, 1, place.device)
        gc.unfreeze()
    lanes = {name: found for name, (found, _) in entries.items()}
    return results_of(place, spent, lanes, peaks, losses, before), too_large


def learn(advance: Advance, place: Place) -> float | None:
    """Train a little; returns the most that the last step allocated, in MiB."""
    advance(LEARNING_STEPS - 1)
    if not place.on_gpu:
        advance(1)
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    advance(1)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def leave_memory(place: Place) -> None:
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()


def results_of(
    place: Place,
    spent: Mapping[str, Tensor],
    lanes: Mapping[str, int | None],
    peaks: Mapping[str, float | None],
    losses: Mapping[str, float],
    before: float,
) -> list[Result]:
    first = next(iter(spent))
    fall = abs(before - losses[first])
    results = []
    for name, table in spent.items():
        ratio, low, high = ratio_to(spent[first], table)
        comparable = name not in (OWN_RANK, OWN_LANE)
        results.append(
            Result(
                world=place.world,
                batch=place.batch,
                variant=name,
                lanes=lanes[name],
                milliseconds=milliseconds(table, place.steps),
                ratio=ratio,
                low=low,
                high=high,
                cpu_ratio=cpu_ratio_to(spent[first], table),
                mebibytes=peaks[name],
                rounds=len(table),
                goal=GOALS.get(name),
                loss=losses[name],
                agrees=not comparable or abs(losses[name] - losses[first]) <= TOLERANCE * fall,
            )
        )
    return results


# -- showing -------------------------------------------------------------------------------


def results_table(results: Sequence[Result]) -> Table:
    table = Table(title="A step whose loss is over the whole batch", title_justify="left")
    for column in ("ranks", "batch", "variant"):
        table.add_column(column, no_wrap=True)
    for column in ("lanes", "ms/step", "ratio", "95% range", "goal", "CPU ratio", "MiB", "loss"):
        table.add_column(column, justify="right")
    before = None
    for result in results:
        here = (str(result.world), str(result.batch))
        if before not in (None, here):
            table.add_section()
        loss = f"{result.loss:.4f}"
        table.add_row(
            *(("", "") if here == before else here), result.variant,
            "" if result.lanes is None else str(result.lanes),
            f"{result.milliseconds:.2f}", f"{result.ratio:.3f}",
            f"{result.low:.3f}-{result.high:.3f}", goal_cell(result.ratio, result.goal),
            f"{result.cpu_ratio:.3f}",
            "" if result.mebibytes is None else f"{result.mebibytes:.0f}",
            loss if result.agrees else f"[red]{loss}[/]",
        )  # fmt: skip
        before = here
    return table


def places_of(options: Namespace) -> list[list[Place]]:
    """Return where variants run; one list for each group of processes."""
    device = device_of(options)
    if device.type == "cuda":
        batches = [int(batch) for batch in options.batches.split(",")]
        return [[Place(1, device, batch, 256, max(1, 4096 // batch)) for batch in batches]]
    each, lane, steps = (32, 8, 1) if options.quick else (128, 32, 2)
    worlds = [int(world) for world in options.worlds.split(",")]
    return [[Place(world, device, each * world, lane, steps)] for world in worlds]


def main() -> None:
    parser = common_options("What a loss over the whole global batch costs.", ROUNDS)
    add_device_option(parser)
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks; on a GPU only 1 runs")
    sizes = ",".join(map(str, GPU_BATCHES))
    parser.add_argument("--batches", default=sizes, help=f"on a GPU (default: {sizes})")
    options = parser.parse_args()
    rounds, facts = rounds_of(options, ROUNDS), machine(device_of(options))

    results: list[Result] = []
    notes: list[str] = []
    for places in places_of(options):
        measured, found = on_ranks(places[0].world, measure_all, places, rounds)
        results, notes = results + measured, notes + found
        write_json(options.json, facts, results, too_large=notes)
    show([results_table(results)], facts, rounds, notes)
    if not all(result.agrees for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
