"""AMPTrainer: one class around the step engine, fed batch by batch.

A batch is a lane of a step; `accumulation_steps` of them on every rank are one step, whose
gradients are summed in the same order on any number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.amp import saved
from samestep.amp.config import AMPConfig
from samestep.amp.feeding import FedSteps, Loss
from samestep.distributed.context import RunContext, SingleProcessContext
from samestep.distributed.health.activity import SAVE
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment
from samestep.errors import PlanError, StepError, TaskError, UserError
from samestep.optim.kernels import choose_kernels
from samestep.optim.precision import Precision, choose_precision

Self = TypeVar("Self", bound="AMPTrainer")
_LEARNING_RATE = 1e-3


class AMPTrainer:
    """Trains a model in bf16, fp16 or fp32, in one process; `training_step` takes the batches."""

    def __init__(
        self,
        model: nn.Module,
        config: AMPConfig | None = None,
        *,
        amp_config: AMPConfig | None = None,
        loss_fn: Callable[..., Loss] | None = None,
        optimizer: Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        learning_rate: float | None = None,
        accumulation_steps: int = 1,
        log_dir: str | Path | None = None,
    ) -> None:
        """`loss_fn(model(input), target)` gives a batch's mean loss, or its sum and its count.

        Without one the model gives the loss. `scheduler` moves on after every step that counts.
        Every rank writes its own log into `log_dir`.
        """
        if optimizer is not None and learning_rate is not None:
            raise UserError("learning_rate is for the trainer's own optimizer, and you gave one")
        if accumulation_steps < 1:
            raise PlanError(f"accumulation_steps is {accumulation_steps}: it is at least 1")
        self.config = _one_of(config, amp_config)
        self.model, self.loss_fn, self.scheduler = model, loss_fn, scheduler
        self.optimizer = _adamw(model, learning_rate) if optimizer is None else optimizer
        self.accumulation_steps = accumulation_steps
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._context: RunContext | None = None
        self._known_precision: Precision | None = None
        self._fed: FedSteps | None = None
        self._why_over: str | None = None
        self._saves: Counter[int] = Counter()

    # -- training --------------------------------------------------------------------------

    def training_step(self, batch: Any) -> float:
        """Train on one batch, and change the weights with the last one of an accumulation.

        Gives the batch's mean loss. All ranks call this equally often: one that has no batch
        left gives None, and gets NaN.
        """
        steps = self._steps()
        with self._failing_for_all(steps):
            return steps.take(batch, self.compute_loss)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches, and None for as long as any other rank has more.

        So all ranks end together, with whole steps, whatever the lengths of their loaders.
        """
        steps = self._steps()
        left, nothing = iter(loader), object()
        following = next(left, nothing)
        try:
            while True:
                for _ in range(self.accumulation_steps):
                    batch = following
                    following = next(left, nothing)
                    steps.has_more = following is not nothing
                    yield None if batch is nothing else batch
                if not steps.any_rank_has_more:
                    return
        finally:
            steps.has_more = False

    def compute_loss(self, batch: Any) -> Loss:
        """Return the mean loss of a batch, or its sum and what it was summed over. Yours to override."""
        model = self._steps().model
        if self.loss_fn is not None:
            if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                raise TaskError(
                    f"loss_fn needs batches of (input, target), not {type(batch).__name__}: leave "
                    "it out if the model gives the loss, or override compute_loss"
                )
            *inputs, target = batch
            return self.loss_fn(model(*inputs), target)
        if isinstance(batch, Mapping):
            out = model(**batch)
        else:
            out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
        return getattr(out, "loss", out)  # type: ignore[no-any-return]

    # -- what is known ---------------------------------------------------------------------

    @property
    def precision_dtype(self) -> torch.dtype:
        """Return what matrix products are computed in."""
        return self._precision.dtype

    @property
    def is_using_bf16(self) -> bool:
        return self.precision_dtype is torch.bfloat16

    @property
    def scale(self) -> float:
        """The loss scale of the next step; 1 without loss scaling."""
        if self._precision.kind != "fp16":
            return 1.0
        scale = None if self._fed is None else self._fed.scale
        return float(self.config.initial_scale) if scale is None else scale

    @property
    def last_clipping_stats(self) -> dict[str, Any] | None:
        """The gradient's norm before it was last clipped; None if it never was.

        With the strategy norm also the limit, and whether the norm was above it.
        """
        norm, limit = self.get_gradient_summary()["norm"], self.config.gradient_clip_max_norm
        if norm is None or limit is None:
            return None
        if self.config.gradient_clip_strategy != "norm":
            return {"norm": norm}
        return {"norm": norm, "max_norm": limit, "clipped": norm > limit}

    def get_gradient_summary(self) -> dict[str, Any]:
        """Steps so far, how many were skipped, the scale, and with clipping the last norm."""
        steps = self._fed
        return {
            "steps": 0 if steps is None else steps.done,
            "skipped_steps": 0 if steps is None else steps.skipped,
            "scale": self.scale,
            "norm": None if steps is None else steps.norm,
        }

    # -- checkpoints -----------------------------------------------------------------------

    def save_checkpoint(
        self, path: str | Path, *, include_optimizer: bool = True, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Write everything that the training needs to resume, after a whole step."""
        self._save(path, 0, include_optimizer, metadata)

    def _save(self, path: str | Path, writer: int, include_optimizer: bool, metadata: Mapping[str, Any] | None) -> None:
        steps = self._between_steps("save_checkpoint")
        steps.refuse_bad_weights()
        state: dict[str, Any] = {saved.MODEL: self.model.state_dict()}
        if include_optimizer:
            state[saved.OPTIMIZER] = self.optimizer.state_dict()
            if self.scheduler is not None:
                state[saved.SCHEDULER] = self.scheduler.state_dict()
        state |= {saved.TRAINER: steps.state_dict(), saved.METADATA: dict(metadata or {})}
        # Counted by writer: a rank may have saved alone, and the others must not wait for a number that it has passed.
        self._saves[writer] += 1
        event = f"save {self._saves[writer]} by rank {writer} of {steps.name}"
        with steps.context.activity.during(SAVE):
            if steps.context.rank == writer:
                saved.write(Path(path), state)
                steps.context.notify(event)
            else:
                steps.context.wait_for(event, writer)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, on every rank; gives its metadata."""
        steps = self._between_steps("load_checkpoint")
        state = saved.read_on_all(Path(path), steps.context)
        saved.put_back(Path(path), state, self.model, self.optimizer, self.scheduler)
        steps.load_state_dict(state[saved.TRAINER])
        metadata: dict[str, Any] = state[saved.METADATA]
        return metadata

    def _between_steps(self, call: str) -> FedSteps:
        steps = self._steps()
        if steps.taken:
            raise StepError(
                f"{call} came after {steps.taken} of {self.accumulation_steps} batches of a step: "
                "call it when training_step has changed the weights"
            )
        return steps

    # -- opening and closing ---------------------------------------------------------------

    def _open_context(self) -> RunContext:
        on_gpu = torch.cuda.is_available()
        context = SingleProcessContext(f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu")
        launch = detect_launch(process_environment())
        if launch.world > 1:
            context.log.warn(
                f"this is rank {launch.rank} of {launch.world}, and AMPTrainer trains by itself: "
                "DistributedAMPTrainer trains with the others"
            )
        return context

    def _open(self) -> RunContext:
        if self._why_over is not None:
            raise StepError(f"this trainer {self._why_over}: make a new one")
        if self._context is None:
            self._context = context = self._open_context()
            if self._log_dir is not None:
                context.log_to(self._log_dir, append=True)
            chosen = choose_precision(self.config.precision, context.device)
            context.on_close(choose_kernels(chosen, deterministic="warn"))
            self._known_precision = chosen
            context.log.main(f"Precision {chosen.kind} on {context.device} ({chosen.reason})")
        return self._context

    @property
    def _precision(self) -> Precision:
        if self._known_precision is None:
            self._open()
        assert self._known_precision is not None, "known once it is open"
        return self._known_precision

    def _steps(self) -> FedSteps:
        """Return the steps of all ranks, to begin or continue. All ranks call this together."""
        context = self._open()
        if self._fed is None:
            objects = [self.model, self.optimizer, *([self.scheduler] if self.scheduler else [])]
            self._fed = FedSteps(self.config, context, self._precision, objects, self.accumulation_steps)
        return self._fed

    @contextmanager
    def _failing_for_all(self, steps: FedSteps) -> Iterator[None]:
        """A step that fails here fails on every rank, and cannot be gone on with."""
        try:
            yield
        except BaseException as error:
            self._why_over = f"failed in step {steps.done}"
            meant = steps.context.failed(error)
            if meant is error:
                raise
            raise meant from error

    def close(self) -> None:
        """Give back what was opened: a process group, a log. Safe to call twice."""
        self.__exit__(None, None, None)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context, self._context = self._context, None
        self._why_over = self._why_over or "is closed"
        if context is not None:
            context.__exit__(kind, error, trace)


def _one_of(config: AMPConfig | None, amp_config: AMPConfig | None) -> AMPConfig:
    found = [given for given in (config, amp_config) if given is not None]
    if len(found) != 1:
        how = "not both" if found else "such as AMPConfig.auto()"
        raise UserError(f"give an AMPConfig as config or as amp_config, {how}")
    return found[0]


def _adamw(model: nn.Module, learning_rate: float | None) -> Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    rate = _LEARNING_RATE if learning_rate is None else learning_rate
    # Fused: whether a step counts is then decided on the GPU, and nothing waits for it.
    return torch.optim.AdamW(params, lr=rate, fused=True)
