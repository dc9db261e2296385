"""Every tensor of some steps, in the order in which they are computed: what `verify --explain` reads.

Each rank writes its own file, one line per tensor: a digest that decides whether two are the same,
and a few of its elements that say how far they are apart.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from samestep.data.batch import LaneBatch
from samestep.errors import CheckpointError
from samestep.parsing.json_text import read_json_lines
from samestep.parsing.numbers import whole_number
from samestep.pytree import tensors
from samestep.run.run import Run
from samestep.run.state_tensors import dense, digest_of, named_modules, parameter_names, state_tensors, text_tensor
from samestep.step.lane_scope import NO_LANE
from samestep.step.lane_tensor import LaneTensor
from samestep.step.step import Step
from samestep.tracking.listeners import RunListener

BEFORE, LANE, SUM, AFTER = 0, 1, 2, 3
"""The parts of a step, in order: its state before it, its lanes, their sum, the update."""

_SAMPLED = 256


@dataclass(frozen=True)
class Entry:
    """One tensor of a step."""

    step: int
    part: int
    lane: int | None
    order: int
    """Its place among the tensors of this part and lane."""
    kind: str
    """samples, batch, input, output, loss, buffer, gradient or state."""
    name: str
    call: int
    """The how manieth of this kind and name, for modules that are called more than once."""
    digest: str
    dtype: str
    elements: str
    """Up to 256 of its elements, evenly spread, as bytes in base64."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Return what identifies it among those of its step, part and lane."""
        return self.kind, self.name, self.call

    def values(self) -> Tensor:
        """Return the elements that were kept."""
        data = bytearray(base64.b64decode(self.elements))
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def read_trace(folder: Path) -> list[list[Entry]]:
    """Return the entries of every rank, in the order in which they were written."""
    found = {path: whole_number(path.stem.partition("-")[2]) for path in folder.glob("rank-*.jsonl")}
    ranks = sorted((rank, path) for path, rank in found.items() if rank is not None)
    return [list(_read_entries(path)) for _, path in ranks]


def _read_entries(path: Path) -> Iterator[Entry]:
    names = {field.name for field in fields(Entry)}
    for number, row in enumerate(read_json_lines(path), 1):
        if row is None or row.keys() != names:
            raise CheckpointError(f"{path}, line {number}, is no entry of a trace")
        yield Entry(**row)


class Tracer(RunListener):
    """Follows a run from some step on and writes every tensor that it computes."""

    draws, reads_gradients = False, True

    def __init__(self, run: Run, folder: Path, first: int) -> None:
        self._run, self._first = run, first
        self._path = folder / f"rank-{run.context.rank}.jsonl"
        self._entries: list[Entry] = []
        self._at: tuple[int, int, int | None] | None = None
        """The step, its part and the lane that tensors belong to now; None if none is wanted."""
        self._orders: Counter[tuple[int, int, int | None]] = Counter()
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._reading: int | None = None
        """The step whose batches were read last."""
        self._hooks: list[RemovableHandle] = []
        run.add_listener(self)
        run.watch_lanes(self)

    # -- what the run calls ----------------------------------------------------------------

    def on_batch(self, step: int, batch: LaneBatch) -> None:
        self._reading = step
        if not self._wants(step):
            return
        before, self._at = self._at, (step, LANE, batch.lane)
        self._take("samples", "", text_tensor(repr(batch.ids)))
        for number, tensor in enumerate(tensors(batch.data)):
            self._take("batch", str(number), tensor)
        self._at = before

    def enter_lane(self, step: int, lane: int) -> None:
        self._at = (step, LANE, lane) if self._wants(step) else None

    def forget_lane(self) -> None:
        if self._at is None:
            return
        for entry in [e for e in self._entries if (e.step, e.part, e.lane) == self._at]:
            if entry.kind not in ("samples", "batch"):
                self._entries.remove(entry)
                self._orders[self._at] -= 1
                self._calls[self._at, entry.kind, entry.name] -= 1

    def leave_lane(self, loss: Tensor | float, count: Tensor | float) -> None:
        if self._at is not None:
            self._take("loss", "", torch.as_tensor(loss))
            self._take("loss", "count", torch.as_tensor(count))
            self._take_buffers()

    def leave_lanes(self) -> None:
        self._at = None

    def summed(self, step: int) -> None:
        if self._wants(step):
            self._at = (step, SUM, None)
            names = parameter_names(self._run.state.modules)
            for number, param in enumerate(self._params()):
                if param.grad is not None:
                    self._take("gradient", names.get(id(param), f"parameter-{number}"), param.grad)
            self._take_buffers()
        self._at = None

    def on_step(self, step: Step) -> None:
        if self._wants(step.index):
            self._take_state(step.index, AFTER)
            self._write()

    # -- hooks -----------------------------------------------------------------------------

    def _wants(self, step: int) -> bool:
        """Return whether this step is traced; before its first tensor, that begins."""
        if step >= self._first and not self._hooks:
            self._take_state(step, BEFORE)
            self._hooks = list(self._watch())
        return step >= self._first

    def _watch(self) -> Iterator[RemovableHandle]:
        modules = self._run.state.modules
        for prefix, root in named_modules(modules):
            for name, module in root.named_modules(prefix=prefix):
                yield module.register_forward_pre_hook(partial(self._take_input, name), with_kwargs=True)
                yield module.register_forward_hook(partial(self._take_output, name))
        names = parameter_names(modules)
        for number, param in enumerate(self._params()):
            name = names.get(id(param), f"parameter-{number}")
            # Not after it was accumulated: by then the sum over lanes may have taken it.
            yield param.register_hook(partial(self._take, "gradient", name))

    def _take_input(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._take_all("input", name, [args, kwargs])

    def _take_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._take_all("output", name, output)

    def _params(self) -> list[Tensor]:
        groups = [group for opt in self._run.state.optimizers for group in opt.param_groups]
        found = {id(param): param for group in groups for param in group["params"]}
        return [param for param in found.values() if param.requires_grad]

    # -- taking ----------------------------------------------------------------------------

    def _take_state(self, step: int, part: int) -> None:
        self._at = (step, part, None)
        state = state_tensors(self._run.state)
        # What an optimizer holds comes first: it is what its update changes weights by.
        for name in sorted(state, key=lambda name: not name.startswith("optimizer")):
            self._take("state", name, state[name])
        self._at = None

    def _take_buffers(self) -> None:
        for prefix, module in named_modules(self._run.state.modules):
            kept = module.state_dict()
            for name, buffer in module.named_buffers():
                if name in kept:
                    self._take("buffer", f"{prefix}.{name}", buffer)

    def _take_all(self, kind: str, name: str, data: Any) -> None:
        for number, tensor in enumerate(tensors(data)):
            self._take_lanes(kind, f"{name}[{number}]" if number else name, tensor)

    def _take_lanes(self, kind: str, name: str, tensor: Tensor) -> None:
        """Take a tensor of the open lane, or of all lanes where they run together."""
        if type(tensor) is not LaneTensor:
            self._take(kind, name, tensor)
            return
        before, step = self._at, self._reading
        for lane, value in zip(tensor.lanes, tensor.per_lane, strict=True):
            if step is not None and lane != NO_LANE:
                self._at = (step, LANE, lane)
                self._take(kind, name, value)
        self._at = before

    def _take(self, kind: str, name: str, tensor: Tensor) -> None:
        if self._at is None:
            return
        step, part, lane = self._at
        order = self._orders[self._at]
        call = self._calls[self._at, kind, name]
        self._orders[self._at] += 1
        self._calls[self._at, kind, name] += 1
        whole = dense(tensor)
        flat = whole.flatten()
        few = flat[:: max(1, -(-len(flat) // _SAMPLED))].contiguous()
        elements = base64.b64encode(few.view(torch.uint8).numpy().tobytes()).decode()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries.append(Entry(step, part, lane, order, kind, name, call, digest_of(whole), dtype, elements))

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(entry)) + "\n" for entry in self._entries)
        self._entries.clear()
