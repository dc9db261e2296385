"""Loops of other libraries on the same task, as their documentation shows them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.bench.contestants import LeftOut, Seat, clipper, epochs, refuse_task
from samestep.bench.turns import Advance, InThread, in_turns
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment


def open_accelerate(seat: Seat) -> Advance:
    """Hugging Face Accelerate."""
    _require("accelerate")
    refuse_task(seat.task, seat.config)
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=seat.context.device.type == "cpu",
        mixed_precision="bf16" if seat.precision.kind == "bf16" else "no",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    if accelerator.num_processes != seat.context.world:
        raise LeftOut(f"it found {accelerator.num_processes} of {seat.context.world} ranks with this launcher")
    model = seat.task.model()
    optimizers = seat.optimizers(model)
    wrapped, loader, *prepared = accelerator.prepare(model, seat.loader(shards=False), *optimizers)
    steps = _accelerate_steps(seat, accelerator, wrapped.train(), loader, prepared)
    return in_turns(steps, seat.stack)


def _accelerate_steps(
    seat: Seat, accelerator: Any, model: nn.Module, loader: Any, optimizers: list[Optimizer]
) -> Generator[None, None, None]:
    clip, losses = clipper(seat.config, model), 0.0
    for step, data in enumerate(epochs(loader), start=1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with accelerator.autocast():
            loss = seat.mean_loss(model, data)
        accelerator.backward(loss)
        clip()
        for optimizer in optimizers:
            optimizer.step()
        if step % seat.config.log_every == 0:
            losses += loss.item()
        yield


def open_lightning(seat: Seat) -> Advance:
    """Return the Lightning Trainer, in a thread, since it owns its loop."""
    _require("lightning")
    refuse_task(seat.task, seat.config)
    launch, world = detect_launch(process_environment()), seat.context.world
    if world > 1 and "TORCHELASTIC_RUN_ID" not in process_environment():
        raise LeftOut("it would start ranks itself: it knows those of torchrun only")
    from lightning.pytorch import Trainer

    warnings.filterwarnings("ignore", module="lightning")
    trainer = Trainer(
        accelerator="gpu" if seat.context.device.type == "cuda" else "cpu",
        devices=launch.local_world,
        num_nodes=world // launch.local_world,
        strategy="ddp" if world > 1 else "auto",
        precision="bf16-mixed" if seat.precision.kind == "bf16" else "32-true",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(seat.folder),
    )
    loader = seat.loader(shards=True)
    return InThread(lambda end_step: trainer.fit(_lightning_module(seat, end_step), loader), seat.stack)


def _lightning_module(seat: Seat, end_step: Callable[[], None]) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]  # may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.learner = seat.task.model()
            self._clip = clipper(seat.config, self.learner)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return seat.mean_loss(self.learner, batch)

        def configure_optimizers(self) -> Any:
            return seat.optimizers(self.learner)[0]

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self._clip()

        def on_train_batch_end(self, *_: Any) -> None:
            end_step()

    return Module()


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise LeftOut("not installed")
