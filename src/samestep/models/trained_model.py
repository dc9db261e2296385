"""A trained model, loaded from a run's directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from samestep.checkpoint.choose_weights import model_state
from samestep.checkpoint.format import read_training
from samestep.checkpoint.listing import select_checkpoint
from samestep.checkpoint.manifest import Manifest, verify_checkpoint
from samestep.checkpoint.state import require
from samestep.config import Config
from samestep.errors import CheckpointError
from samestep.run.origin import refuse_untrusted_task
from samestep.run.run_dir import config_of
from samestep.train.task import Task, load_task


@dataclass(frozen=True)
class Trained:
    """A model with its weights, and where they come from."""

    config: Config
    task: Task
    model: nn.Module
    extra_modules: Sequence[nn.Module]
    """What the task's `extra_modules` returned, as trained: no average is made of them."""
    manifest: Manifest
    weights: str


def load_trained(
    run: Path,
    which: str = "best",
    weights: str = "raw",
    device: torch.device | str = "cpu",
    overrides: Sequence[str] = (),
    prepare: Callable[[Task], None] = lambda task: None,
    trust: bool = False,
) -> Trained:
    """Load the model and the extra modules of a run, in evaluation mode.

    Args:
        run: the run's directory.
        which: the checkpoint: best, last or the number of a step.
        weights: raw, ema, swa or average.
        device: where to put the model.
        overrides: `section.key=value` texts for the run's config.
        prepare: called with the task before it creates its model.
        trust: whether the task's code may run although it is not known to be this user's.

    Raises:
        NotTrusted: if the run's directory names code that this user has not started the run with.
        CheckpointError: if there is no such checkpoint, or it does not fit the task's model.

    Example:
        >>> trained = load_trained(Path("runs/digits"), weights="ema")
        >>> trained.model(batch)
    """
    config = config_of(run, overrides)
    folder = select_checkpoint(run, which).folder
    manifest = verify_checkpoint(folder)
    refuse_untrusted_task(run, config, overrides, trust)
    task = load_task(config)
    prepare(task)
    model, extra_modules = task.model(), list(task.extra_modules())
    training = read_training(folder)
    require(training, "modules")
    saved = [model_state(run, folder, weights, training), *training["modules"]]
    if len(saved) != 1 + len(extra_modules):
        raise CheckpointError(
            f"{folder} does not fit the task: it holds {len(saved) - 1} extra modules, and "
            f"extra_modules() returns {len(extra_modules)}"
        )
    for module, state in zip((model, *extra_modules), saved, strict=True):
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            what = "model" if module is model else type(module).__name__
            raise CheckpointError(f"{folder} does not fit the task's {what}: {error}") from error
        module.to(device).eval()
    return Trained(config, task, model, extra_modules, manifest, weights)
