"""What a step of samestep costs, compared with the hand-written loop.

    python benchmarks/overhead.py [--quick] [--rounds N] [--worlds 1,2] [--device cpu|cuda]
                                  [--json FILE]

Every contestant has its own model, optimizer and loader, and all run in the same process (with
two ranks: in the same two processes, on the same process group). They take short turns in rotating
order, and some turns of each are a round. A disturbance of the machine that lasts longer than a
turn affects all of them; the median over the rounds' ratios removes the rest. The first round is a
warm-up and is not counted. The hand-written loop runs twice: the ratio of the second to the first,
which should be 1, shows how far the others can be trusted.

Two ratios are shown. `time` is wall time, what a user waits for. `CPU` is processor time,
summed over threads and ranks: other programs on the machine hardly change it, but it includes
neither waiting nor the GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import (
    THREADS,
    Contestant,
    Result,
    add_device_option,
    common_options,
    compare,
    device_of,
    machine,
    on_ranks,
    result_table,
    rounds_of,
    show,
    time_rounds,
    turns_of,
    write_json,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import samestep

GOAL = 1.03
ROUNDS = 12
READ_EVERY = 10
"""Steps between two reads of the loss, in every contestant."""
EPOCH_STEPS = 200
GPU_STEPS = 100
"""Steps in a turn on a GPU: many, since each turn ends with a wait for the device."""
HAND_WRITTEN = "hand-written"
CONTROL = "hand-written, again"


@dataclass(frozen=True)
class Workload:
    """A model with its data; `batch` is the number of samples per rank and step."""

    name: str
    batch: int
    turns: int
    """Turns of each contestant in one round (on a GPU: one)."""
    steps: int
    """Steps in a turn. A round's steps are a multiple of READ_EVERY."""
    model: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]


# -- workloads -----------------------------------------------------------------------------


def mlp(layers: int, width: int, classes: int = 10) -> nn.Module:
    hidden = [m for _ in range(layers - 1) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def vectors(samples: int, width: int, classes: int = 10) -> TensorDataset:
    return TensorDataset(torch.randn(samples, width), torch.randint(classes, (samples,)))


class Transformer(nn.Module):
    """A small causal language model with dropout."""

    def __init__(self, layers: int, width: int, vocabulary: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(tokens, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position
        logits: Tensor = self.head(self.layers(hidden, mask=self.mask, is_causal=True))
        return logits


def texts(samples: int, vocabulary: int, tokens: int) -> TensorDataset:
    text = torch.randint(vocabulary, (samples, tokens + 1))
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


WORKLOADS = (
    Workload(
        "MLP 4x256, batch 128", 128, 5, 10,
        lambda: mlp(4, 256), lambda samples: vectors(samples, 256),
    ),
    Workload(
        "transformer 4x128, batch 4x64", 4, 10, 1,
        lambda: Transformer(4, 128, 256, 64), lambda samples: texts(samples, 256, 64),
    ),
)  # fmt: skip


def loss_of(model: nn.Module, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    logits = model(x)
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction=reduction)


def optimizer_of(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-4)


# -- contestants ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the contestants run."""

    world: int
    device: torch.device


def hand_written(workload: Workload, dataset: TensorDataset, place: Place) -> Contestant:
    """The loop that people write without samestep; on several ranks, with torch's own tools."""
    model = workload.model().to(place.device)
    if place.world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_of(model)
    loader, sampler = hand_written_loader(workload, dataset, place)
    steps, losses = 0, []
    for epoch in count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            x, y = (tensor.to(place.device, non_blocking=True) for tensor in batch)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, x, y, "mean")
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % READ_EVERY == 0:
                losses.append(loss.item())
            yield


def hand_written_loader(
    workload: Workload, dataset: TensorDataset, place: Place
) -> tuple[DataLoader[Any], DistributedSampler[Any] | None]:
    sampler: DistributedSampler[Any] | None = None
    if place.world > 1:
        sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(
        dataset,
        batch_size=workload.batch,
        shuffle=sampler is None,
        sampler=sampler,
        num_workers=0,
        drop_last=True,
        pin_memory=place.device.type == "cuda",
    )
    return loader, sampler


def driven_by_samestep(run: samestep.Run, workload: Workload, dataset: TensorDataset) -> Contestant:
    """The same loop on samestep's steps."""
    model = workload.model()
    model, optimizer = run.prepare(model, optimizer_of(model))
    for step in run.steps(dataset):
        for batch in step.lanes:
            loss = loss_of(model, batch.x, batch.y, "sum")
            step.backward(loss, count=batch.y.numel())
        step.update(optimizer)
        yield


def open_run(workload: Workload, place: Place, same: str, folder: Path) -> samestep.Run:
    """A run of one lane per rank that is longer than any benchmark."""
    return samestep.start(
        {
            "task": "none.py:None",  # required, but a custom loop never loads it
            "run_dir": str(folder),
            "steps": 10**9,
            "global_batch": workload.batch * place.world,
            "lanes": place.world,
            "same": same,
            "drop_last": True,
            "log_every": READ_EVERY,
            "checkpoint": {"enabled": False},  # checkpoint.py measures saving
            "loader": {"workers": 0},
            "distributed": {"device": place.device.type, "threads_per_rank": THREADS},
        }
    )


def open_contestants(
    workload: Workload, place: Place, by_hand: Sequence[str], levels: Sequence[str],
    stack: ExitStack,
) -> dict[str, Contestant]:  # fmt: skip
    """Hand-written loops by these names, then samestep at these levels of sameness."""
    dataset = workload.data(workload.batch * place.world * EPOCH_STEPS)
    contestants = {name: hand_written(workload, dataset, place) for name in by_hand}
    folder = [stack.enter_context(tempfile.TemporaryDirectory(prefix="samestep-benchmark-"))]
    if place.world > 1:
        dist.broadcast_object_list(folder)  # all ranks of a run share rank 0's directory
    for same in levels:
        name = f"samestep, {same}"
        run = stack.enter_context(open_run(workload, place, same, Path(folder[0]) / same))
        contestants[name] = driven_by_samestep(run, workload, dataset)
        stack.callback(contestants[name].close)  # before its run is closed
    return contestants


# -- one process, and several --------------------------------------------------------------


def measure(workload: Workload, place: Place, rounds: int) -> list[Result]:
    """All contestants of one workload on this process, or on this rank and the others."""
    by_hand = [HAND_WRITTEN, CONTROL]
    levels = ["bits"] if place.world == 1 else ["bits", "rounding"]
    spent, steps = race(workload, place, by_hand, levels, rounds)
    goals = {f"samestep, {same}": GOAL for same in levels}
    return compare(workload.name, place.world, spent, steps, goals)


def race(
    workload: Workload, place: Place, by_hand: Sequence[str], levels: Sequence[str], rounds: int
) -> tuple[dict[str, Tensor], int]:
    """The time of each contestant in each round, and the number of steps in a round."""
    on_gpu = place.device.type == "cuda"
    turns, steps = (1, GPU_STEPS) if on_gpu else (workload.turns, workload.steps)
    with ExitStack() as stack:
        contestants = open_contestants(workload, place, by_hand, levels, stack)
        spent = time_rounds(turns_of(contestants, steps), rounds, turns, place.device)
    return spent, turns * steps


def measure_all(place: Place, rounds: int) -> list[Result]:
    return [result for workload in WORKLOADS for result in measure(workload, place, rounds)]


def main() -> None:
    parser = common_options("What a step costs with and without samestep.", ROUNDS)
    add_device_option(parser)
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks; on a GPU only 1 runs")
    options = parser.parse_args()
    rounds, device = rounds_of(options, ROUNDS), device_of(options)
    on_gpu = device.type == "cuda"
    worlds = [1] if on_gpu else [int(world) for world in options.worlds.split(",")]

    results: list[Result] = []
    for world in worlds:
        results += on_ranks(world, measure_all, Place(world, device), rounds)
    facts = machine(device)
    show(
        [result_table("A step, hand-written and with samestep", "ms/step", results)], facts, rounds
    )
    write_json(options.json, facts, results)


if __name__ == "__main__":
    main()
