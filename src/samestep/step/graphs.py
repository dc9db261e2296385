"""Steps replayed as CUDA graphs.

A step is captured once its batches' shapes have been seen a few times, compared with an eager run to
the bit, and from then on replayed: batches are copied to where the graph reads them, every lane's
generator is put at the start of its stream, learning rates and scales are read from the device. What
does not fit a captured step runs eagerly, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.config import Config
from samestep.data.batch import LaneBatch
from samestep.distributed.context import RunContext
from samestep.errors import GraphError
from samestep.optim.update import takes_rate_from_device
from samestep.pytree import leaves, signature
from samestep.reduce.buffer_slots import keep_buffers
from samestep.step.capture import capture, fresh_stream
from samestep.step.captured_constants import CapturedConstants, loss_code
from samestep.step.engine import LossFunction, StepEngine
from samestep.step.lane_passes import LanePasses, WholeLanes
from samestep.step.recorded_step import RecordedLanes, RecordedStep, host_generators, refuse_other_numbers

_OWNERS_STEP = "distributed.shard: optimizer lets owners step, and send their weights"
_WARM_UP = 3
"""Eager steps before a capture: libraries set themselves up in the first ones."""
_CAPTURABLE = (Tensor, bool, int, float, type(None))
_SHAPES = 4
"""Shapes of batches that are captured; each costs memory for its activations."""
_REMEMBERED = 4096
"""Shapes that are counted: texts of all lengths have no end of them."""
_CHANGES = 5
"""Times that a value which a capture holds may change before steps are not captured again."""
_WIDEST = 8
"""Lanes side by side that fill a GPU, if memory allows."""
_SHARE = 0.5
"""Share of the free memory that lanes side by side may take by themselves."""


def why_no_graph(config: Config, device: torch.device, optimizers: Sequence[Optimizer]) -> str | None:
    """Return what keeps this run from CUDA graphs; None if nothing does."""
    if device.type != "cuda":
        return f"this rank runs on {device}"
    if config.same != "bits":
        return f"same: {config.same} uses DistributedDataParallel, which is not captured"
    if config.distributed.shard == "weights":
        return "distributed.shard: weights gathers weights in the middle of a pass, which is not captured"
    if config.distributed.shard == "optimizer" and config.speed.graph is True:
        return f"{_OWNERS_STEP}, outside of graphs"
    if config.distributed.find_unused_parameters:
        return "distributed.find_unused_parameters lets parameters come and go"
    if config.memory.lane_split != 1:
        return "memory.lane_split runs lanes in pieces"
    if config.memory.checkpoint:
        return "memory.checkpoint reads the state of the generator, which a capture cannot"
    return why_no_update(optimizers) if config.speed.graph is True else None


def why_no_update(optimizers: Sequence[Optimizer]) -> str | None:
    """Return what keeps the update out of the graphs; None if nothing does."""
    for optimizer in optimizers:
        if not takes_rate_from_device(optimizer):
            name = type(optimizer).__name__
            return f"{name} reads its learning rate on the host: make it {name}(..., fused=True)"
    return None


class GraphedSteps(WholeLanes):
    """Runs steps eagerly at first, and then by replay."""

    def __init__(self, context: RunContext, modules: Sequence[nn.Module], config: Config) -> None:
        self._strict = config.speed.graph is True
        self.needs_function = "speed.graph: true" if self._strict else ""
        self._context, self._modules = context, modules
        self._generator = torch.cuda.default_generators[context.device.index or 0]
        width = config.speed.parallel_lanes
        self._fills_memory = width == "auto"
        self._widest = _WIDEST if width == "auto" else width
        """Number of lanes that may run side by side; fewer after a capture for which memory was too small."""
        self._seen: dict[Any, int] = {}
        """By shape, how many steps there were of it."""
        self._refused: set[Any] = set()
        self._said: set[str] = set()
        self._changes = self._update_changes = 0
        self._may_capture_update: bool | None = None
        self._forget()

    def _forget(self) -> None:
        self._steps: dict[Any, RecordedStep] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._streams: list[torch.cuda.Stream] = []

    def run_step(self, passes: LanePasses, loss: LossFunction) -> None:
        step = self._recorded(passes, loss, self._captures_update)
        if step is None:
            super().run_step(passes, loss)
            return
        step.replay(passes, self._brought(step, passes))

    def reduce(self, passes: LanePasses, loss: LossFunction) -> bool:
        """Leave the mean over all lanes of all ranks in `.grad`, if the step is captured by now."""
        step = self._recorded(passes, loss, lambda engine: False)
        if step is None:
            return False
        passes.reduced_by(step.reduce(self._brought(step, passes), passes.data.index))
        return True

    def _brought(self, step: RecordedStep, passes: LanePasses) -> Sequence[LaneBatch]:
        batches = passes.batches.read_all()
        return [passes.batches.on_device(batch) for batch in batches] if step.is_large else batches

    def _recorded(
        self, passes: LanePasses, loss: LossFunction, may_capture_update: Callable[[StepEngine], bool]
    ) -> RecordedStep | None:
        """Return the captured step of these batches, if there is one by now."""
        batches = passes.batches.read_all()
        if not batches or passes.engine.watch is not None:
            return None
        shape = self._shape(batches, loss)
        step = self._steps.get(shape)
        if step is not None and not self._still_fits(step, shape):
            step = None
            self._drop(shape)
        return step or self._record(shape, passes, loss, may_capture_update)

    def _shape(self, batches: Sequence[LaneBatch], loss: LossFunction) -> Any:
        """Return what one captured step is good for."""
        return (*[(b.lane, signature(b.data)) for b in batches], loss_code(loss))

    def _still_fits(self, step: RecordedStep, shape: Any) -> bool:
        """Return whether nothing that a capture holds has changed; what changes too often is given up."""
        if name := step.of_loss.changed():
            self._changes += 1
            if self._changes >= _CHANGES:
                self._refuse(shape, f"{name} keeps changing, which a replay would not follow")
            return False
        if name := step.of_optimizers.changed():
            self._update_changes += 1
            if self._update_changes >= _CHANGES:
                self._no_update(f"{name} keeps changing")
            return False
        return True

    def _drop(self, shape: Any) -> None:
        del self._steps[shape]
        if not self._steps:
            self._pool = torch.cuda.graph_pool_handle()  # the last graph takes the old one along

    def _no_update(self, why: str) -> None:
        self._may_capture_update = False
        self.say(f"the update runs without a graph: {why}")

    # -- capture ---------------------------------------------------------------------------

    def _record(
        self, shape: Any, passes: LanePasses, loss: LossFunction, may_capture_update: Callable[[StepEngine], bool]
    ) -> RecordedStep | None:
        """Return the step of batches of this shape, if it is time for one and there can be one."""
        if shape in self._refused:
            return None
        if len(self._seen) == _REMEMBERED:
            self._seen.clear()  # hardly one of so many comes again
        self._seen[shape] = seen = self._seen.get(shape, 0) + 1
        if seen <= _WARM_UP:
            return None
        why = self._why_not(passes.engine, passes.batches.read_all())
        if why is not None:
            self._refuse(shape, why)
        elif len(self._steps) == _SHAPES:
            self._refused.add(shape)
            self.say(f"a step runs without a graph: batches have more than {_SHAPES} shapes")
        else:
            self._try_to_capture(shape, passes, loss, may_capture_update)
        return self._steps.get(shape)

    def _try_to_capture(
        self, shape: Any, passes: LanePasses, loss: LossFunction, may_capture_update: Callable[[StepEngine], bool]
    ) -> None:
        while True:
            spare = self._generator.clone_state()
            width = self._widest
            try:
                with keep_buffers(self._modules):
                    self._steps[shape] = self._captured(passes, loss, may_capture_update(passes.engine))
                return
            except (RuntimeError, GraphError) as error:
                # A capture that failed leaves the generator unusable. Graphs hold on to its state:
                # with another one the others must be captured again.
                self._generator.graphsafe_set_state(spare)
                self._forget()
                if isinstance(error, torch.OutOfMemoryError) and width > 1:
                    self._widest = width // 2
                    continue
                why = str(error) or type(error).__name__
                if not isinstance(error, GraphError):
                    why = f"the loss cannot be captured: {why.splitlines()[0]}"
                self._refuse(shape, why, error)
                return

    def _why_not(self, engine: StepEngine, batches: Sequence[LaneBatch]) -> str | None:
        for batch in batches:
            for leaf in leaves(batch.data):
                if not isinstance(leaf, _CAPTURABLE):
                    kind = type(leaf).__name__
                    return f"a batch holds a {kind}, which a replay would not follow"
        return engine.reduction.buffers.why_not_recorded

    def _captured(self, passes: LanePasses, loss: LossFunction, captures_update: bool) -> RecordedStep:
        engine, step, batches = passes.engine, passes.data.index, passes.batches.read_all()
        of_loss = CapturedConstants.of_loss(loss, self._modules)
        of_optimizers = CapturedConstants.of_optimizers(engine.optimizers if captures_update else ())
        lanes = RecordedLanes(engine, batches, loss, passes.moment)

        def run_eagerly() -> None:
            lanes.seed(step)
            lanes.run()

        run_eagerly()
        lanes.see_who_draws()
        eager = [None if value is None else value.clone() for value in lanes.results()]
        if changed := of_loss.changed():
            of_loss.put_back()  # this was not the step's own pass
            raise GraphError(f"the loss changes {changed}, which a replay would not")
        width = self._choose_width(len(batches), lanes.lane_bytes, engine)
        self._check_capture(lanes, eager, width, run_eagerly, step)
        streams = self._side_streams(width)
        made = RecordedStep(lanes, engine, of_loss, of_optimizers, streams, self._pool, captures_update)
        self._context.log.main(
            f"speed.graph: steps are replayed from here on, {width} of {len(batches)} lanes side by side"
            f"{'' if captures_update else '; the update runs without a graph'}"
        )
        return made

    def _check_capture(
        self,
        lanes: RecordedLanes,
        eager: Sequence[Tensor | None],
        width: int,
        run_eagerly: Callable[[], None],
        step: int,
    ) -> None:
        """Capture the lanes alone, and refuse them if a replay gives other numbers."""
        draws, streams = host_generators(), self._side_streams(width)
        graph = capture(lambda: lanes.run(streams), generators=lanes.drawn_from.values())
        if draws != host_generators():
            raise GraphError("the loss draws random numbers on the host, which a replay does not")
        lanes.seed(step)
        graph.replay()
        refuse_other_numbers(lanes, eager, run_eagerly)
        lanes.forget()  # before the graph goes, so that its memory is free again

    def _captures_update(self, engine: StepEngine) -> bool:
        if self._may_capture_update is None:
            why = why_no_update(engine.optimizers)
            if why is None and engine.update.waits:
                why = "it waits for the device to learn whether a step counts"
            if why is None and engine.reduction.owned_update is not None:
                why = _OWNERS_STEP
            if why is None and not engine.reduction.gradients.finishes_on_device:
                why = "no parameter is float32 or float64, to send the losses along with"
            self._may_capture_update = True
            if why is not None:
                self._no_update(why)
        return self._may_capture_update

    def _choose_width(self, lanes: int, lane_bytes: int, engine: StepEngine) -> int:
        """Return how many lanes run side by side."""
        if not self._fills_memory:
            return min(self._widest, lanes)
        grads = sum(param.numel() * param.element_size() for param in engine.params)
        device = self._context.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = (torch.cuda.mem_get_info(device)[0] + unused) * _SHARE
        width = min(self._widest, lanes)
        while width > 1 and width * (lane_bytes + grads) > free:
            width -= 1
        return width

    def _side_streams(self, width: int) -> list[torch.cuda.Stream]:
        """None for one lane at a time."""
        if width == 1:
            return []
        while len(self._streams) < width:
            self._streams.append(fresh_stream())
        return self._streams[:width]

    def _refuse(self, shape: Any, why: str, error: Exception | None = None) -> None:
        self._refused.add(shape)
        self.refuse("a step", why, error)

    def refuse(self, what: str, why: str, error: Exception | None = None) -> None:
        """Tell once why something is not captured; if it must be, raise that."""
        if self._strict:
            raise GraphError(f"speed.graph: true, but {why}. speed.graph: auto then trains without") from error
        self.say(f"{what} runs without a graph: {why}")

    def say(self, line: str) -> None:
        """Log it once: batches of every shape may have the same trouble."""
        if line not in self._said:
            self._said.add(line)
            self._context.log.main(f"speed.graph: {line}")
