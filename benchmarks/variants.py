"""Variants of peers.py and lanes.py: the loop by hand, a bare CUDA graph, and samestep.

All run in one process, each with its own settings of torch in its turns (`samestep.bench.scaling`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contest import CLIP, SEED, Contest
from in_thread import InThread
from measuring import THREADS
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import samestep
from samestep.bench.baselines import Advance, in_turns
from samestep.bench.workloads import HostData, collate_nothing
from samestep.optim.kernels import choose_kernels
from samestep.optim.precision import Precision
from samestep.train.loop import Training

GRAPH_WARM_UP = 3
"""Steps before the bare graph is captured, as torch's documentation recommends."""
ENDLESS = 10**9
TOLERANCE = 0.01
"""Largest difference from the hand-written loop's loss, relative to the decrease of that loss."""

Steps = Generator[None, None, None]


@dataclass(frozen=True)
class LoopContext:
    """The surroundings of one variant: the contest, its own model, a directory, and a stack to close."""

    contest: Contest
    model: nn.Module
    folder: Path
    stack: ExitStack

    def log(self) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that writes rows to a file, as in a hand-written loop."""
        path = self.folder / "losses.jsonl"
        file = self.stack.enter_context(path.open("w", buffering=1, encoding="utf-8"))
        return lambda row: print(json.dumps(row), file=file)


def repeat_forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


# -- by hand -------------------------------------------------------------------------------


def hand_written(loop: LoopContext) -> Steps:
    """Return the loop that people write without a library."""
    contest, model, log = loop.contest, loop.model, loop.log()
    optimizer = contest.optimizer(model)
    for step, batch in enumerate(repeat_forever(contest.loader()), start=1):
        x, y = (tensor.to(contest.device, non_blocking=True) for tensor in batch)
        optimizer.zero_grad(set_to_none=True)
        with contest.autocast():
            loss = model(x, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step % contest.log_every == 0:
            log({"step": step, "loss": loss.item()})
        yield


def open_hand_written(loop: LoopContext) -> Advance:
    return in_turns(hand_written(loop), loop.stack)


def open_in_thread(loop: LoopContext) -> Advance:
    def train(end_step: Callable[[], None]) -> None:
        for _ in hand_written(loop):
            end_step()

    return InThread(train, loop.stack)


def bare_graph(loop: LoopContext) -> Steps:
    """Return the lower limit: the whole step is one captured graph, without anything else."""
    contest, model, log = loop.contest, loop.model, loop.log()
    optimizer = contest.optimizer(model)
    for group in optimizer.param_groups:
        group["capturable"] = True
    first = contest.dataset.__getitems__(range(contest.workload.batch))
    x, y = (torch.empty_like(tensor, device=contest.device) for tensor in first)
    loss = torch.zeros((), device=contest.device)

    def step_once() -> None:
        optimizer.zero_grad(set_to_none=True)
        with contest.autocast():
            now = model(x, y)
        now.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        loss.copy_(now.detach())

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    for step, batch in enumerate(repeat_forever(contest.loader()), start=1):
        for static, tensor in zip((x, y), batch, strict=True):
            static.copy_(tensor, non_blocking=True)
        if step <= GRAPH_WARM_UP:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step_once()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if step == GRAPH_WARM_UP + 1:
                with torch.cuda.graph(graph):
                    step_once()
            graph.replay()
        if step % contest.log_every == 0:
            log({"step": step, "loss": loss.item()})
        yield


def open_bare_graph(loop: LoopContext) -> Advance:
    return in_turns(bare_graph(loop), loop.stack)


def deterministic(open_it: Callable[[LoopContext], Advance]) -> Callable[[LoopContext], Advance]:
    """Return the same with the kernels that `same: bits` takes: what they cost without samestep."""

    def open_deterministic(loop: LoopContext) -> Advance:
        choose_kernels(Precision("fp32", "by hand", loop.contest.device), deterministic=True)
        return open_it(loop)

    return open_deterministic


# -- samestep ------------------------------------------------------------------------------


class ContestTask(samestep.Task):
    """The contest as a task of samestep."""

    def __init__(self, loop: LoopContext) -> None:
        self._seat = loop

    def model(self) -> nn.Module:
        return self._seat.model

    def train_data(self) -> HostData:
        return self._seat.contest.dataset

    def order(self, dataset: HostData) -> Any:
        return samestep.orders.sequential(len(dataset))

    def collate(self, samples: Any) -> Any:
        return collate_nothing(samples)

    def optimizers(self, model: nn.Module) -> Optimizer:
        return self._seat.contest.optimizer(model)

    def loss(self, model: nn.Module, batch: samestep.LaneBatch) -> tuple[Tensor, float]:
        return model(batch.x, batch.y, "sum"), batch.y.numel()


@dataclass(frozen=True)
class Samestep:
    """samestep's own loop; with neither of these set, as a new user's config leaves it."""

    lanes: int | None = None
    graph: bool | None = None
    parallel_lanes: int | None = None

    def open(self, loop: LoopContext) -> Advance:
        run = loop.stack.enter_context(samestep.start(self.config(loop, clip={"norm": CLIP})))
        return in_turns(Training(run, ContestTask(loop)).steps(), loop.stack)

    def config(self, loop: LoopContext, **others: Any) -> dict[str, Any]:
        speed = {"graph": self.graph, "parallel_lanes": self.parallel_lanes}
        return {
            "run_dir": str(loop.folder),
            "seed": SEED,
            "steps": ENDLESS,
            "global_batch": loop.contest.workload.batch,
            "lanes": self.lanes,
            "precision": loop.contest.workload.precision,
            "log_every": loop.contest.log_every,
            "speed": {key: value for key, value in speed.items() if value is not None},
            "checkpoint": {"enabled": False},
            "distributed": {"device": loop.contest.device.type, "threads_per_rank": THREADS},
            **others,
        }


class SamestepLoop(Samestep):
    """The hand-written loop on a run of samestep: its lines, but for the device and autocast."""

    def open(self, loop: LoopContext) -> Advance:
        run = loop.stack.enter_context(samestep.start(self.config(loop)))
        return in_turns(_own_loop(loop, run), loop.stack)


def _own_loop(loop: LoopContext, run: samestep.Run) -> Steps:
    contest, log = loop.contest, loop.log()
    model, optimizer, loader = run.prepare(loop.model, contest.optimizer(loop.model), contest.loader())
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad(set_to_none=True)
        loss = model(x, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step % contest.log_every == 0:
            log({"step": step, "loss": loss.item()})
        yield


# -- what they learned ---------------------------------------------------------------------


@dataclass(frozen=True)
class Reached:
    loss: float
    weights: Tensor


def reached_by(contest: Contest, model: nn.Module) -> Reached:
    """Return the loss and weights of a training, from a copy, since libraries wrap the model."""
    if contest.on_gpu:
        torch.cuda.synchronize(contest.device)  # it may have trained on another stream
    probe = contest.model().eval()
    probe.load_state_dict(model.state_dict())
    first = contest.dataset.__getitems__(range(contest.workload.batch))
    with torch.no_grad():
        loss = probe(*(tensor.to(contest.device) for tensor in first)).item()
    weights = torch.cat([param.detach().flatten().double() for param in probe.parameters()])
    return Reached(loss, weights.cpu())
