"""The model to export: its methods, its argument names, its outputs on real batches, and what is built of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import FunctionModifiers

from samestep.errors import ExportError, TaskError
from samestep.lanes.random_streams import reseed
from samestep.models.export.examples import FORWARD, Examples, Inputs, varying_axes
from samestep.parsing.limits import short

METADATA_FILE = "samestep.json"
"""The metadata's name in formats that are archives of files."""
_LONGEST = 400
"""Characters of an error's text."""
METADATA_KEY = "samestep"
"""The metadata's name in formats that hold key-value texts."""


@dataclass(frozen=True)
class Built:
    """A model that is ready to be written."""

    how: str
    """How it was built: scripted, traced, exported, weights only."""
    notes: tuple[str, ...]
    """What the user should know about it."""
    save: Callable[[Path, str], None]
    """Writes it to a path, with the metadata's text inside."""


def reason(error: Exception) -> str:
    """Return the first line with text of an error's root cause, and torch's explanation of it where there is one."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line][:1] or [type(error).__name__]
    reasons += [line for line in lines if line.startswith("Explanation:")][:1]
    return short("; ".join(line.rstrip(".:") for line in reasons), _LONGEST)


Outputs = dict[str, Tensor]
"""The outputs of a method, flat: its tensors by name."""
Runner = Callable[[str, Inputs], Any]
"""Calls a method of a model."""


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, with real batches and its outputs on them."""

    model: nn.Module
    fresh: Callable[[], nn.Module]
    """Creates another one, as it is before training."""
    methods: tuple[str, ...]
    """Those besides forward that are to be exported."""
    device: torch.device
    examples: Examples
    outputs: Mapping[str, tuple[Outputs, ...]]
    """By method, its outputs on each of the batches."""

    @property
    def names(self) -> list[str]:
        """The names of forward's arguments."""
        return argument_names(self.model, FORWARD, len(self.examples.inputs[FORWARD][0]))

    def signature(self, method: str) -> dict[str, list[dict[str, Any]]]:
        """Return a method's arguments and results: names, shapes and types."""
        inputs, outputs = self.examples.inputs[method], self.outputs[method]
        names = argument_names(self.model, method, len(inputs[0]))
        flat = [list(batch.values()) for batch in outputs]
        return {"inputs": self._describe(names, inputs), "outputs": self._describe(list(outputs[0]), flat)}

    def _describe(self, names: Sequence[str], batches: Sequence[Sequence[Tensor]]) -> list[dict[str, Any]]:
        varying = varying_axes(batches)
        return [
            {
                "name": name,
                "shape": [
                    axis_name(self.examples, tensor, axis) if axis in axes else size
                    for axis, size in enumerate(tensor.shape)
                ],
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for name, tensor, axes in zip(names, batches[0], varying, strict=True)
        ]


def axis_name(examples: Examples, tensor: Tensor, axis: int) -> str:
    """Return the name of an axis of varying length: batch or any; the tensor is of the first batch."""
    return "batch" if tensor.shape[axis] == examples.sizes[0] else "any"


def argument_names(model: nn.Module, method: str, count: int) -> list[str]:
    """Return the names of a method's first `count` arguments, from its definition."""
    names: list[str] = []
    for parameter in inspect.signature(getattr(model, method)).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{number}" for number in range(count - len(names))]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names[:count]


def methods_to_keep(model: nn.Module, requested: Sequence[str]) -> tuple[str, ...]:
    """Return the methods marked with @torch.jit.export, and the requested ones, which must exist."""
    here = {
        name: function
        for name, function in inspect.getmembers(type(model), inspect.isfunction)
        if not hasattr(nn.Module, name) and not name.startswith("__")
    }
    unknown = [name for name in requested if name not in here and name != FORWARD]
    if unknown:
        raise ExportError(
            f"--methods names {', '.join(unknown)}, which {type(model).__name__} does not have: "
            + (f"it has {', '.join(here)}" if here else "it has none besides forward")
            + ". A task's export_model(self, model) can return a model that has them"
        )
    marked = [
        name
        for name, function in here.items()
        if getattr(function, "_torchscript_modifier", None) == FunctionModifiers.EXPORT
    ]
    return tuple(sorted({*marked, *requested} - {FORWARD}))


def outputs_of(run: Runner, method: str, inputs: Inputs) -> Outputs:
    """Return the outputs of a method, flat; with the same random draws in every call."""
    reseed(0)
    # A method may differentiate; forward alone needs no autograd graph.
    with torch.set_grad_enabled(method != FORWARD):
        value = run(method, tuple(tensor.clone() for tensor in inputs))
    return {name: tensor.detach() for name, tensor in _leaves(value, "")}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{name}_{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for number, part in enumerate(value):
            yield from _leaves(part, f"{name or 'output'}_{number}")
    elif isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, (bool, int, float)):
        yield name or "output", torch.tensor(value)
    elif value is not None:
        raise TaskError(
            f"the exported model returned a {type(value).__name__}: it can return tensors, and tuples, "
            "lists and dictionaries of them. Override export_model(self, model) to change that"
        )


def live_outputs(model: nn.Module, examples: Examples) -> dict[str, tuple[Outputs, ...]]:
    """Return the outputs of each method of a model on each of the batches."""

    def run(method: str, inputs: Inputs) -> Any:
        try:
            inspect.signature(getattr(model, method)).bind(*inputs)
        except TypeError as error:
            raise TaskError(
                f"{type(model).__name__}.{method} does not take what model_inputs returns, "
                f"{len(inputs)} argument(s): {error}. Override model_inputs(self, batch, method)"
            ) from None
        try:
            return model(*inputs) if method == FORWARD else getattr(model, method)(*inputs)
        except Exception as error:
            if method == FORWARD:
                raise
            raise TaskError(
                f"{type(model).__name__}.{method} failed on what model_inputs returns for it: "
                f"{error}. If it takes other arguments than forward, override "
                "model_inputs(self, batch, method)"
            ) from error

    found = {
        method: tuple(outputs_of(run, method, inputs) for inputs in batches)
        for method, batches in examples.inputs.items()
    }
    for method, batches in found.items():
        if len({tuple(batch) for batch in batches}) > 1:
            raise TaskError(
                f"{type(model).__name__}.{method} returns different tensors on different batches, "
                + ", ".join(str(list(batch)) for batch in batches)
                + ": an exported model always returns the same ones"
            )
    return found
