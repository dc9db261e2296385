"""What a training step costs with samestep and with other libraries.

    python benchmarks/peers.py [--workload mlp|gpt|both] [--contestants a,b] [--rounds N]
                               [--optimizer fused|default] [--dropout P] [--device cpu|cuda]
                               [--quick] [--json FILE]

Every contestant trains the same model from the same weights on the same batches (contest.py):
AdamW, gradients clipped at norm 1, the loss logged every 10 steps by the contestant's own logger,
no evaluation, no checkpoints, no progress bar. All run in one process and take turns: a round is
some steps of each, and the device is synchronized before and after. Trainers that own their loop
run it in a thread, which is released for a round's steps; a second hand-written loop does so too,
and its ratio, which should be 1, shows what that costs and how far to trust the rest.

Without dropout all must have learned the same after the first round. The table shows each loss, and
a contestant that trained something else is reported, since its time means nothing. `--quick` runs
fewer steps and a tiny GPT.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import tempfile
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from contest import (
    CLIP,
    LOG_EVERY,
    SEED,
    Contest,
    HostData,
    collate_nothing,
    open_contest,
    workload_of,
)
from measuring import (
    THREADS,
    Advance,
    InThread,
    add_device_option,
    common_options,
    cpu_ratio_to,
    device_of,
    goal_cell,
    in_turns,
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
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

import samestep
from samestep.train.loop import Training

ROUNDS = 20
GRAPH_WARM_UP = 3
"""Steps before the bare graph is captured, as torch's documentation recommends."""
ENDLESS = 10**9
TOLERANCE = 0.01
"""Largest difference from the hand-written loop's loss, relative to the decrease of that loss."""

HAND_WRITTEN, CONTROL = "hand-written", "hand-written, in a thread"
EAGER, GRAPH, BARE_GRAPH = "samestep", "samestep-graph", "bare-graph"

Steps = Generator[None, None, None]


@dataclass(frozen=True)
class Seat:
    """What one contestant gets: the contest, its own model, a directory, and a stack to close."""

    contest: Contest
    model: nn.Module
    folder: Path
    stack: ExitStack

    def log(self) -> Callable[[Mapping[str, Any]], None]:
        """A function that writes rows to a file, as in a hand-written loop."""
        path = self.folder / "losses.jsonl"
        file = self.stack.enter_context(path.open("w", buffering=1, encoding="utf-8"))
        return lambda row: print(json.dumps(row), file=file)


def repeat_forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


# -- contestants ---------------------------------------------------------------------------


def hand_written(seat: Seat) -> Steps:
    """The loop that people write without a library."""
    contest, model, log = seat.contest, seat.model, seat.log()
    optimizer = contest.optimizer(model)
    for step, batch in enumerate(repeat_forever(contest.loader()), start=1):
        x, y = (tensor.to(contest.device, non_blocking=True) for tensor in batch)
        optimizer.zero_grad(set_to_none=True)
        with contest.autocast():
            loss = model(x, y)
        loss.backward()
        clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if step % LOG_EVERY == 0:
            log({"step": step, "loss": loss.item()})
        yield


def open_hand_written(seat: Seat) -> Advance:
    return in_turns(hand_written(seat), seat.stack)


def open_control(seat: Seat) -> Advance:
    def train(end_step: Callable[[], None]) -> None:
        for _ in hand_written(seat):
            end_step()

    return InThread(train, seat.stack)


def bare_graph(seat: Seat) -> Steps:
    """The lower limit: the whole step is one captured graph, without anything else."""
    contest, model, log = seat.contest, seat.model, seat.log()
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
        if step % LOG_EVERY == 0:
            log({"step": step, "loss": loss.item()})
        yield


def open_bare_graph(seat: Seat) -> Advance:
    return in_turns(bare_graph(seat), seat.stack)


class PeersTask(samestep.Task):
    """The contest as a task of samestep."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

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


def open_samestep(seat: Seat, graph: bool) -> Advance:
    """samestep's own loop, with one lane."""
    workload, device = seat.contest.workload, seat.contest.device
    config = {
        "run_dir": str(seat.folder),
        "seed": SEED,
        "steps": ENDLESS,
        "global_batch": workload.batch,
        "lanes": 1,
        "precision": workload.precision,
        "clip": {"norm": CLIP},
        "log_every": LOG_EVERY,
        "speed": {"graph": graph},
        "checkpoint": {"enabled": False},
        "distributed": {"device": device.type, "threads_per_rank": THREADS},
    }
    run = seat.stack.enter_context(samestep.start(config))
    return in_turns(Training(run, PeersTask(seat)).steps(), seat.stack)


def open_eager(seat: Seat) -> Advance:
    return open_samestep(seat, graph=False)


def open_graph(seat: Seat) -> Advance:
    return open_samestep(seat, graph=True)


def open_accelerate(seat: Seat) -> Advance:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
    from accelerate.utils import DataLoaderConfiguration

    contest, model, log = seat.contest, seat.model, seat.log()

    class Tracker(GeneralTracker):
        name, requires_logging_directory = "jsonl", False

        @property
        def tracker(self) -> Any:
            return log

        def store_init_configuration(self, values: Mapping[str, Any]) -> None:
            log(values)

        def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
            log({"step": step, **values})

    accelerator = Accelerator(
        cpu=not contest.on_gpu,
        mixed_precision="no" if contest.workload.precision == "fp32" else "bf16",
        log_with=Tracker(),
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )

    def steps() -> Steps:
        accelerator.init_trackers("peers", {})
        wrapped, optimizer, loader = accelerator.prepare(
            model, contest.optimizer(model), contest.loader()
        )
        for step, (x, y) in enumerate(repeat_forever(loader), start=1):
            optimizer.zero_grad()
            loss = wrapped(x, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
            optimizer.step()
            if step % LOG_EVERY == 0:
                accelerator.log({"loss": loss.item()}, step=step)
            yield

    return in_turns(steps(), seat.stack)


def for_lightning(contest: Contest) -> dict[str, Any]:
    """Device and precision of Fabric and the Lightning Trainer."""
    return {
        "accelerator": "gpu" if contest.on_gpu else "cpu",
        "devices": 1,
        "precision": "32-true" if contest.workload.precision == "fp32" else "bf16-mixed",
    }


def open_fabric(seat: Seat) -> Advance:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    contest, model = seat.contest, seat.model
    fabric = Fabric(**for_lightning(contest), loggers=CSVLogger(str(seat.folder)))

    def steps() -> Steps:
        fabric.launch()
        wrapped, optimizer = fabric.setup(model, contest.optimizer(model))
        for step, (x, y) in enumerate(repeat_forever(fabric.setup_dataloaders(contest.loader()))):
            optimizer.zero_grad()
            loss = wrapped(x, y)
            fabric.backward(loss)
            # Its NaN check would wait for the device in every step; no other contestant does that.
            fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP, error_if_nonfinite=False)
            optimizer.step()
            if (step + 1) % LOG_EVERY == 0:
                fabric.log("loss", loss, step=step)
            yield

    return in_turns(steps(), seat.stack)


def open_lightning(seat: Seat) -> Advance:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    contest, model = seat.contest, seat.model

    class Module(LightningModule):
        def __init__(self, end_step: Callable[[], None]) -> None:
            super().__init__()
            self.learner, self.end_step = model, end_step

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.learner(*batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Optimizer:
            return contest.optimizer(self.learner)

        def configure_gradient_clipping(self, *_: Any, gradient_clip_val: Any, **__: Any) -> None:
            # Its built-in clipping refuses a fused optimizer in bf16, though only fp16 needs that.
            clip_grad_norm_(self.parameters(), gradient_clip_val)

        def on_train_batch_end(self, *_: Any) -> None:
            self.end_step()

    trainer = Trainer(
        **for_lightning(contest),
        max_epochs=-1,
        logger=CSVLogger(str(seat.folder)),
        log_every_n_steps=LOG_EVERY,
        gradient_clip_val=CLIP,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return InThread(lambda end_step: trainer.fit(Module(end_step), contest.loader()), seat.stack)


def open_hf_trainer(seat: Seat) -> Advance:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    contest, model, log = seat.contest, seat.model, seat.log()

    class Callback(TrainerCallback):
        def __init__(self, end_step: Callable[[], None]) -> None:
            self.end_step = end_step

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.end_step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            log({"step": state.global_step, **logs})

    class PlainTrainer(Trainer):
        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any
        ) -> Any:
            return model(**inputs)

    arguments = TrainingArguments(
        output_dir=str(seat.folder),
        use_cpu=not contest.on_gpu,
        bf16=contest.workload.precision == "bf16",
        per_device_train_batch_size=contest.workload.batch,
        max_steps=ENDLESS,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        logging_steps=LOG_EVERY,
        logging_nan_inf_filter=False,  # it would wait for the device in every step
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        accelerator_config={"non_blocking": True},
        dataloader_pin_memory=contest.on_gpu,
    )
    trainer = PlainTrainer(
        model,
        arguments,
        data_collator=lambda batch: dict(zip("xy", batch, strict=True)),
        train_dataset=contest.dataset,
        optimizers=(contest.optimizer(model), None),
    )
    trainer.remove_callback(PrinterCallback)

    def train(end_step: Callable[[], None]) -> None:
        trainer.add_callback(Callback(end_step))
        trainer.train()

    return InThread(train, seat.stack)


@dataclass(frozen=True)
class Entry:
    """How a contestant is opened, and what it requires."""

    open: Callable[[Seat], Advance]
    packages: tuple[str, ...] = ()
    gpu: bool = False

    def lacks(self, device: torch.device) -> str | None:
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        return "needs a GPU" if self.gpu and device.type != "cuda" else None


ENTRIES = {
    HAND_WRITTEN: Entry(open_hand_written),
    CONTROL: Entry(open_control),
    EAGER: Entry(open_eager),
    GRAPH: Entry(open_graph, gpu=True),
    "accelerate": Entry(open_accelerate, ("accelerate",)),
    "fabric": Entry(open_fabric, ("lightning",)),
    "lightning": Entry(open_lightning, ("lightning",)),
    "hf-trainer": Entry(open_hf_trainer, ("transformers", "accelerate")),
    BARE_GRAPH: Entry(open_bare_graph, gpu=True),
}
ALWAYS = (HAND_WRITTEN, CONTROL)
"""The reference of all others, and the control that shows how good the comparison is."""


# -- measuring -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of a measuring process."""

    workload: str
    quick: bool
    device: torch.device
    rounds: int
    fused: bool
    dropout: float
    contestants: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """One contestant, compared with the hand-written loop and the bare graph."""

    workload: str
    contestant: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    """`low` to `high` holds the true median ratio in about 95 of 100 runs."""
    graph_ratio: float | None
    graph_low: float | None
    graph_high: float | None
    """The same compared with the bare graph, if that ran."""
    cpu_ratio: float
    rounds: int
    goal: float | None
    goal_against: str | None
    loss_before: float
    loss: float
    """On one batch, before the first round and after it."""
    apart: float
    """Distance of its weights from the hand-written loop's, relative to how far those moved."""
    agrees: bool


def measure(settings: Settings) -> tuple[list[Result], dict[str, str]]:
    """Measure all contestants of one workload in this process; report which failed, and why."""
    quieten()
    workload = workload_of(settings.workload, settings.quick)
    contest = open_contest(workload, settings.device, settings.fused, settings.dropout)
    reached: dict[str, Reached] = {}
    turns: dict[str, Callable[[], None]] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="samestep-peers-")))
        for name in settings.contestants:
            (root / name).mkdir()
            seat = Seat(contest, contest.model(), root / name, stack)
            try:
                turn = turn_of(ENTRIES[name].open(seat), workload.steps)
                turn()
            except Exception as error:
                if name == HAND_WRITTEN:
                    raise
                traceback.print_exc()
                failed[name] = f"on {workload.name}: {type(error).__name__}: {error}"
            else:
                # Compared now: after more steps, rounding alone makes them differ.
                turns[name], reached[name] = turn, reached_by(contest, seat.model)
        # Otherwise a collection of everything the libraries allocated falls into someone's round.
        gc.collect()
        gc.freeze()
        spent = time_rounds(turns, settings.rounds, 1, settings.device)
    drops = settings.workload == "gpt" and settings.dropout > 0
    return results_of(contest, spent, reached, drops), failed


def turn_of(advance: Advance, steps: int) -> Callable[[], None]:
    return lambda: advance(steps)


def quieten() -> None:
    """Silence advice on data workers and the like, which does not apply here."""
    warnings.filterwarnings("ignore", module="lightning")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


@dataclass(frozen=True)
class Reached:
    loss: float
    weights: Tensor


def reached_by(contest: Contest, model: nn.Module) -> Reached:
    """The loss and weights of a training, from a copy, since libraries wrap the model."""
    if contest.on_gpu:
        torch.cuda.synchronize(contest.device)  # it may have trained on another stream
    probe = contest.model().eval()
    probe.load_state_dict(model.state_dict())
    first = contest.dataset.__getitems__(range(contest.workload.batch))
    with torch.no_grad():
        loss = probe(*(tensor.to(contest.device) for tensor in first)).item()
    weights = torch.cat([param.detach().flatten().double() for param in probe.parameters()])
    return Reached(loss, weights.cpu())


def results_of(
    contest: Contest, spent: Mapping[str, Tensor], reached: Mapping[str, Reached], drops: bool
) -> list[Result]:
    """A row for each; with dropout each draws its own masks, and no two agree."""
    workload, start = contest.workload, reached_by(contest, contest.initial)
    goals = {EAGER: (1.02, HAND_WRITTEN), GRAPH: (workload.graph_goal, BARE_GRAPH)}
    expected = reached[HAND_WRITTEN]
    moved, fall = (expected.weights - start.weights).norm(), start.loss - expected.loss
    results = []
    for name, table in spent.items():
        ratio, low, high = ratio_to(spent[HAND_WRITTEN], table)
        to_graph = ratio_to(spent[BARE_GRAPH], table) if BARE_GRAPH in spent else (None,) * 3
        goal, against = goals.get(name, (None, None))
        off = abs(reached[name].loss - expected.loss)
        results.append(
            Result(
                workload=workload.name,
                contestant=name,
                milliseconds=milliseconds(table, workload.steps),
                ratio=ratio,
                low=low,
                high=high,
                graph_ratio=to_graph[0],
                graph_low=to_graph[1],
                graph_high=to_graph[2],
                cpu_ratio=cpu_ratio_to(spent[HAND_WRITTEN], table),
                rounds=len(table),
                goal=goal,
                goal_against=against,
                loss_before=start.loss,
                loss=reached[name].loss,
                apart=((reached[name].weights - expected.weights).norm() / moved).item(),
                agrees=drops or off <= TOLERANCE * abs(fall),
            )
        )
    return results


# -- showing -------------------------------------------------------------------------------


def results_table(results: Sequence[Result]) -> Table:
    table = Table(title=f"A step of {results[0].workload}", title_justify="left")
    table.add_column("contestant", no_wrap=True)
    for column in (
        "ms/step", "to hand-written", "95% range", "to bare graph", "goal", "CPU ratio",
        "loss", "apart",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for result in results:
        to_graph, against = result.graph_ratio, result.goal_against
        ratio = to_graph if against == BARE_GRAPH else result.ratio
        loss = f"{result.loss:.4f}"
        table.add_row(
            result.contestant, f"{result.milliseconds:.3f}", f"{result.ratio:.3f}",
            f"{result.low:.3f}-{result.high:.3f}", "" if to_graph is None else f"{to_graph:.3f}",
            "" if ratio is None else goal_cell(ratio, result.goal), f"{result.cpu_ratio:.3f}",
            loss if result.agrees else f"[red]{loss}[/]", f"{result.apart:.1e}",
        )  # fmt: skip
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
            f"[red]{result.contestant} trained something else[/] on {result.workload}: its loss is "
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
        "--contestants", default=",".join(choices), metavar="A,B",
        help=f"of {', '.join(choices)}; the hand-written loop always runs",
    )  # fmt: skip
    parser.add_argument("--optimizer", choices=("fused", "default"), default="fused")
    parser.add_argument("--dropout", type=float, default=0.0, help="in the GPT (default: 0)")
    options = parser.parse_args(arguments)
    options.contestants = [*ALWAYS, *options.contestants.split(",")]
    unknown = [name for name in options.contestants if name not in ENTRIES]
    if unknown:
        parser.error(
            f"no contestant is called {', '.join(unknown)}: there are {', '.join(choices)}"
        )
    return options


def main() -> None:
    options = options_of()
    rounds, device = rounds_of(options, ROUNDS), device_of(options)
    # The HF Trainer would split its batches over all visible GPUs.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    requested = [name for name in ENTRIES if name in options.contestants]
    lacks = {name: ENTRIES[name].lacks(device) for name in requested}
    left_out = {name: why for name, why in lacks.items() if why is not None}
    running = tuple(name for name in requested if name not in left_out)
    facts, fused = facts_of(device, options), options.optimizer == "fused"

    every: list[Result] = []
    all_well = True
    for key in ("mlp", "gpt") if options.workload == "both" else (options.workload,):
        settings = Settings(
            key, options.quick, device, rounds, fused, options.dropout, running
        )  # fmt: skip
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
