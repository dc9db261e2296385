"""DistributedAMPTrainer: the AMPTrainer as one of several ranks. The same training, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.amp.config import AMPConfig
from samestep.amp.trainer import AMPTrainer
from samestep.config import DistributedConfig
from samestep.distributed.collectives import group_is_open
from samestep.distributed.context import RunContext, SingleProcessContext, create_run_context
from samestep.distributed.hardware import detect_hardware
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError, StepError, UserError


class DistributedAMPTrainer(AMPTrainer):
    """Trains a model on several ranks, whose accumulations together are one step."""

    def __init__(
        self,
        model: nn.Module,
        config: AMPConfig | None = None,
        rank: int = 0,
        world_size: int = 1,
        backend: str = "nccl",
        device_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        """`device_ids` names this process's GPU; `options` are what AMPTrainer takes.

        A world of one is whatever the launcher started, or the open process group.
        """
        super().__init__(model, config, **options)
        self._alone = world_size == 1
        found = DistributedConfig.from_env()
        section: dict[str, Any] = {
            "backend": backend,
            # As in one process: torch's threads are the caller's, and can change the last bit.
            "threads_per_rank": torch.get_num_threads(),
            "master_addr": found.master_addr,
            "master_port": found.master_port,
        }
        if (rank, world_size) != (0, 1):
            section |= {"rank": rank, "world_size": world_size}
        self._section = self.config.for_run(max(1, world_size), section).distributed
        if device_ids is not None and len(device_ids) != 1:
            raise LaunchError(f"device_ids is {list(device_ids)}: name one GPU, the one of this process")
        self._device = None if device_ids is None else int(device_ids[0])

    def setup_distributed(self) -> None:
        """Open the process group, or join an open one, and set the device."""
        self._open()

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model to call in a forward pass, with rank 0's weights.

        With `same="bits"` it is the trainer's model itself, whose gradients the trainer sums; with
        "rounding" and several ranks, that model in DistributedDataParallel.
        """
        if model is not self.model:
            raise UserError("wrap_model got another model than the trainer: give it that one")
        return self._steps().model

    def save_checkpoint(
        self,
        path: str | Path,
        rank: int = 0,
        *,
        include_optimizer: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Let one rank write a checkpoint; the others, if they call this, wait until it is there."""
        world = self._open().world
        if not 0 <= rank < world:
            raise StepError(f"save_checkpoint got rank {rank}, and ranks run from 0 to {world - 1}")
        self._save(path, rank, include_optimizer, metadata)

    @staticmethod
    def is_distributed() -> bool:
        """Return whether this process is a rank of an open process group."""
        return group_is_open()

    def _open_context(self) -> RunContext:
        launch, hardware = detect_launch(process_environment()), detect_hardware()
        device = self._device
        if device is not None and not 0 <= device < hardware.device_count:
            raise LaunchError(
                f"device_ids names GPU {device} but torch sees {hardware.device_count}: leave it "
                "out, or name one of them"
            )
        chosen = None if device is None else torch.device("cuda", device)
        if self._alone and launch.world == 1 and not group_is_open():
            return super()._open_context() if chosen is None else SingleProcessContext(chosen)
        return create_run_context(self._section, hardware, launch, chosen)
