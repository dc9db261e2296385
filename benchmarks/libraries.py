"""Variants of peers.py: other libraries, as their documentation shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from contest import CLIP, Contest
from in_thread import InThread
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from variants import ENDLESS, LoopContext, Steps, repeat_forever

from samestep.bench.baselines import Advance, in_turns


def open_accelerate(loop: LoopContext) -> Advance:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
    from accelerate.utils import DataLoaderConfiguration

    contest, model, log = loop.contest, loop.model, loop.log()

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
        wrapped, optimizer, loader = accelerator.prepare(model, contest.optimizer(model), contest.loader())
        for step, (x, y) in enumerate(repeat_forever(loader), start=1):
            optimizer.zero_grad()
            loss = wrapped(x, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
            optimizer.step()
            if step % contest.log_every == 0:
                accelerator.log({"loss": loss.item()}, step=step)
            yield

    return in_turns(steps(), loop.stack)


def for_lightning(contest: Contest) -> dict[str, Any]:
    """Device and precision of Fabric and the Lightning Trainer."""
    return {
        "accelerator": "gpu" if contest.on_gpu else "cpu",
        "devices": 1,
        "precision": "32-true" if contest.workload.precision == "fp32" else "bf16-mixed",
    }


def open_fabric(loop: LoopContext) -> Advance:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import CSVLogger

    contest, model = loop.contest, loop.model
    fabric = Fabric(**for_lightning(contest), loggers=CSVLogger(str(loop.folder)))

    def steps() -> Steps:
        fabric.launch()
        wrapped, optimizer = fabric.setup(model, contest.optimizer(model))
        for step, (x, y) in enumerate(repeat_forever(fabric.setup_dataloaders(contest.loader()))):
            optimizer.zero_grad()
            loss = wrapped(x, y)
            fabric.backward(loss)
            # Its NaN check would wait for the device in every step; no other variant does that.
            fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP, error_if_nonfinite=False)
            optimizer.step()
            if (step + 1) % contest.log_every == 0:
                fabric.log("loss", loss, step=step)
            yield

    return in_turns(steps(), loop.stack)


def open_lightning(loop: LoopContext) -> Advance:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger

    contest, model = loop.contest, loop.model

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
        logger=CSVLogger(str(loop.folder)),
        log_every_n_steps=contest.log_every,
        gradient_clip_val=CLIP,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return InThread(lambda end_step: trainer.fit(Module(end_step), contest.loader()), loop.stack)


def open_hf_trainer(loop: LoopContext) -> Advance:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    contest, model, log = loop.contest, loop.model, loop.log()

    class Callback(TrainerCallback):
        def __init__(self, end_step: Callable[[], None]) -> None:
            self.end_step = end_step

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.end_step()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            log({"step": state.global_step, **logs})

    class PlainTrainer(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Any:
            return model(**inputs)

    arguments = TrainingArguments(
        output_dir=str(loop.folder),
        use_cpu=not contest.on_gpu,
        bf16=contest.workload.precision == "bf16",
        per_device_train_batch_size=contest.workload.batch,
        max_steps=ENDLESS,
        max_grad_norm=CLIP,
        lr_scheduler_type="constant",
        logging_steps=contest.log_every,
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

    return InThread(train, loop.stack)
