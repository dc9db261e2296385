"""Trains the captioner with DistributedAMPTrainer, in one process or as one of several ranks.

python recipes/vision_language/train.py recipes/vision_language/config.yaml run
torchrun --standalone --nproc-per-node 2 recipes/vision_language/train.py recipes/vision_language/config.yaml run

Every rank writes what it has seen to rank-N.json; rank 0 writes captions.json and checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from networks import Captioner, generate, loss_of
from pictures import draw, text_of
from torch import Tensor, nn

from samestep.amp import AMPConfig, DistributedAMPTrainer
from samestep.config import Config, load_config
from samestep.errors import PlanError, SamestepError, UserError
from samestep.train.task import load_task

SHOWN = 12
"""Pictures whose captions are kept."""
PLANTED = 1e6
"""What gradients are multiplied by for an overflow: no number of 16 bits holds the product."""


class CaptionTrainer(DistributedAMPTrainer):
    """Takes batches of pictures and tokens; the loss is a sum over words, and their number."""

    overflows = False
    """Whether the gradient of the next batch is to overflow."""

    def compute_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        pictures, tokens = batch
        logits = self.wrap_model(self.model)(pictures, tokens[:, :-1])
        if self.overflows:
            logits.register_hook(lambda gradient: gradient * PLANTED)
        return loss_of(logits, tokens)


def amp_config(config: Config) -> AMPConfig:
    """Return the part of a run's config that the trainer takes."""
    scale = config.loss_scale
    return AMPConfig(
        precision=config.precision, seed=config.seed, gradient_clip_max_norm=config.clip.norm,
        initial_scale=scale.init, growth_factor=scale.growth, backoff_factor=scale.backoff,
        growth_interval=scale.interval, min_scale=scale.min, max_scale=scale.max, hysteresis=scale.hysteresis,
    )  # fmt: skip


class LaneData:
    """The batches of each step, a lane for each; which of them are this rank's."""

    def __init__(self, task: Any, config: Config, rank: int, world: int) -> None:
        lanes, batch = config.lanes, config.global_batch
        if lanes is None or batch is None or lanes % world:
            raise PlanError(
                f"global_batch is {batch} and lanes is {lanes}: set both, the lanes to a number that {world} ranks divide"
            )
        self.count, self.size = lanes, batch // lanes
        self.mine = range(rank * lanes // world, (rank + 1) * lanes // world)
        self._seed, self._get_batch = config.seed, task.train_data().get_batch

    def batch(self, step: int, lane: int) -> Any:
        """Return what a lane trains on: by seed, step and lane alone, whichever rank it is on."""
        seed = np.random.SeedSequence([self._seed, step, lane]).generate_state(1, np.uint32)[0]
        return self._get_batch(torch.Generator().manual_seed(int(seed)), self.size)


def describe(model: nn.Module, precision: torch.dtype, count: int) -> dict[str, Any]:
    """Return how many held-out pictures get exactly the caption that they were drawn from, and the first captions."""
    assert isinstance(model, Captioner)
    pictures, captions = draw(np.random.default_rng(1), count, held_out=True)
    device = next(model.parameters()).device
    with torch.autocast(device.type, dtype=precision, enabled=precision != torch.float32):
        found = generate(model.eval(), torch.from_numpy(pictures).to(device))
    model.train()
    generated = [text_of(tokens) for tokens in found]
    right = [one == other for one, other in zip(generated, captions, strict=True)]
    return {
        "pictures": count,
        "exact_match": sum(right) / count,
        "captions": captions[:SHOWN],
        "generated": generated[:SHOWN],
    }


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def train(config: Config, given: argparse.Namespace, rank: int, world: int) -> dict[str, Any]:
    """Train, and return what this rank has seen; rank 0 also describes pictures, before and after."""
    torch.manual_seed(config.seed)
    task: Any = load_task(config)
    data, model = LaneData(task, config, rank, world), task.model()
    optimizer = task.optimizers(model)
    with CaptionTrainer(
        model, amp_config(config), rank, world, config.distributed.backend, optimizer=optimizer,
        scheduler=task.schedules([optimizer], config.steps).scheduler, accumulation_steps=len(data.mine),
    ) as trainer:  # fmt: skip
        trainer.setup_distributed()
        first = trainer.load_checkpoint(given.resume)["step"] if given.resume else 0
        before = {} if rank or first else {"before": _described(trainer, given)}
        seen: dict[str, Any] = {
            "rank": rank, "world": world, "lanes": list(data.mine), "first": first, "losses": [], "scales": [],
            "skipped": [], "precision": str(trainer.precision_dtype).removeprefix("torch."),
        }  # fmt: skip
        started = time.perf_counter()
        for step in range(first, config.steps or 0):
            _one_step(trainer, data, given, step, seen)
        seen["seconds"] = time.perf_counter() - started
        seen["digest"] = digest_of(model)
        if rank == 0:
            found = {**before, "after": _described(trainer, given)}
            (given.folder / "captions.json").write_text(json.dumps(found, indent=1))
    return seen


def _described(trainer: CaptionTrainer, given: argparse.Namespace) -> dict[str, Any]:
    return describe(trainer.model, trainer.precision_dtype, given.held_out)


def _one_step(
    trainer: CaptionTrainer, data: LaneData, given: argparse.Namespace, step: int, seen: dict[str, Any]
) -> None:
    skipped = trainer.get_gradient_summary()["skipped_steps"]
    losses = []
    seen["scales"].append(trainer.scale)
    for lane in data.mine:
        # In the last lane, which is the last rank's alone.
        trainer.overflows = step == given.overflow and lane == data.count - 1
        losses.append(trainer.training_step(data.batch(step, lane)))
    seen["losses"].append(losses)
    if trainer.get_gradient_summary()["skipped_steps"] > skipped:
        seen["skipped"].append(step)
    if step + 1 == given.save_at:
        trainer.save_checkpoint(given.folder / f"step-{step + 1}.pt", metadata={"step": step + 1})
    if seen["rank"] == 0 and (step + 1) % 100 == 0:
        print(f"step {step + 1}: loss of lane 0 {losses[0]:.4f}, scale {trainer.scale:g}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train the captioner as one of several ranks.")
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path, help="where this training's files go")
    parser.add_argument("--resume", type=Path, help="a checkpoint, of any number of ranks")
    parser.add_argument("--save-at", type=int, help="write a checkpoint after so many steps")
    parser.add_argument("--overflow", type=int, help="a step whose gradient overflows in one lane")
    parser.add_argument("--held-out", type=int, default=256, help="held-out pictures to describe")
    parser.add_argument("overrides", nargs="*", help="section.key=value of the config")
    given = parser.parse_intermixed_args(arguments)
    rank, world = (int(os.environ.get(name, value)) for name, value in (("RANK", 0), ("WORLD_SIZE", 1)))
    torch.set_num_threads(1)  # more of them can change the last bit
    torch.backends.mkldnn.set_flags(False)  # for products this small it takes five times as long
    try:
        if given.held_out < 1:
            raise UserError(f"--held-out is {given.held_out}: give 1 or more")
        given.folder.mkdir(parents=True, exist_ok=True)
        config = load_config(given.config, given.overrides)
        if given.overflow is not None and config.precision != "fp16":
            raise UserError(f"--overflow needs precision fp16, and it is {config.precision}")
        seen = train(config, given, rank, world)
        (given.folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    except SamestepError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
