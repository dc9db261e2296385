"""Loops of other libraries on the same task, as their documentation shows them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.bench.baselines import LoopContext, Unsupported, clipper, epochs, refuse_task
from samestep.bench.turns import Advance, InThread, in_turns
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment


def open_accelerate(loop: LoopContext) -> Advance:
    """Hugging Face Accelerate."""
    _require("accelerate")
    refuse_task(loop.task, loop.config)
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=loop.context.device.type == "cpu",
        mixed_precision="bf16" if loop.precision.kind == "bf16" else "no",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    if accelerator.num_processes != loop.context.world:
        raise Unsupported(f"it found {accelerator.num_processes} of {loop.context.world} ranks with this launcher")
    model = loop.task.model()
    optimizers = loop.optimizers(model)
    wrapped, loader, *prepared = accelerator.prepare(model, loop.loader(shards=False), *optimizers)
    steps = _accelerate_steps(loop, accelerator, wrapped.train(), loader, prepared)
    return in_turns(steps, loop.stack)


def _accelerate_steps(
    loop: LoopContext, accelerator: Any, model: nn.Module, loader: Any, optimizers: list[Optimizer]
) -> Generator[None, None, None]:
    clip, losses = clipper(loop.config, model), 0.0
    for step, data in enumerate(epochs(loader), start=1):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with accelerator.autocast():
            loss = loop.mean_loss(model, data)
        accelerator.backward(loss)
        clip()
        for optimizer in optimizers:
            optimizer.step()
        if step % loop.config.log_every == 0:
            losses += loss.item()
        yield


def open_lightning(loop: LoopContext) -> Advance:
    """Return the Lightning Trainer, in a thread, since it owns its loop."""
    _require("lightning")
    refuse_task(loop.task, loop.config)
    launch, world = detect_launch(process_environment()), loop.context.world
    if world > 1 and "TORCHELASTIC_RUN_ID" not in process_environment():
        raise Unsupported("it would start ranks itself: it knows those of torchrun only")
    from lightning.pytorch import Trainer

    warnings.filterwarnings("ignore", module="lightning")
    trainer = Trainer(
        accelerator="gpu" if loop.context.device.type == "cuda" else "cpu",
        devices=launch.local_world,
        num_nodes=world // launch.local_world,
        strategy="ddp" if world > 1 else "auto",
        precision="bf16-mixed" if loop.precision.kind == "bf16" else "32-true",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(loop.folder),
    )
    loader = loop.loader(shards=True)
    return InThread(lambda end_step: trainer.fit(_lightning_module(loop, end_step), loader), loop.stack)


def _lightning_module(loop: LoopContext, end_step: Callable[[], None]) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):  # type: ignore[misc]  # may not be installed
        def __init__(self) -> None:
            super().__init__()
            self.learner = loop.task.model()
            self._clip = clipper(loop.config, self.learner)

        def training_step(self, batch: Any, index: int) -> Tensor:
            return loop.mean_loss(self.learner, batch)

        def configure_optimizers(self) -> Any:
            return loop.optimizers(self.learner)[0]

        def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
            self._clip()

        def on_train_batch_end(self, *_: Any) -> None:
            end_step()

    return Module()


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unsupported("not installed")
