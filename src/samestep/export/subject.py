"""The model that is exported: its methods, its names, and what it gives on real batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import FunctionModifiers

from samestep.errors import ExportError, TaskError
from samestep.export.examples import FORWARD, Examples, Inputs, varying_axes
from samestep.lanes.rng import reseed

Outputs = dict[str, Tensor]
"""What a method gave, flat: its tensors by name."""
Runner = Callable[[str, Inputs], Any]
"""Calls a method of a model."""


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, with real batches and what it gives on them."""

    model: nn.Module
    fresh: Callable[[], nn.Module]
    """Another one, as it is before training."""
    methods: tuple[str, ...]
    """Those besides forward that are to be kept."""
    device: torch.device
    examples: Examples
    outputs: Mapping[str, tuple[Outputs, ...]]
    """By method, what it gives on each of the batches."""

    @property
    def names(self) -> list[str]:
        """The names of forward's arguments."""
        return argument_names(self.model, FORWARD, len(self.examples.inputs[FORWARD][0]))

    def signature(self, method: str) -> dict[str, list[dict[str, Any]]]:
        """A method's arguments and results: names, shapes and types."""
        inputs, outputs = self.examples.inputs[method], self.outputs[method]
        names = argument_names(self.model, method, len(inputs[0]))
        flat = [list(batch.values()) for batch in outputs]
        return {
            "inputs": self._described(names, inputs),
            "outputs": self._described(list(outputs[0]), flat),
        }

    def _described(
        self, names: Sequence[str], batches: Sequence[Sequence[Tensor]]
    ) -> list[dict[str, Any]]:
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
    """What an axis of varying length is called; the tensor is of the first batch."""
    return "batch" if tensor.shape[axis] == examples.sizes[0] else "any"


def argument_names(model: nn.Module, method: str, count: int) -> list[str]:
    """The names of a method's first arguments, as its definition gives them."""
    names: list[str] = []
    for parameter in inspect.signature(getattr(model, method)).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{number}" for number in range(count - len(names))]
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names[:count]


def methods_to_keep(model: nn.Module, asked: Sequence[str]) -> tuple[str, ...]:
    """The methods marked with @torch.jit.export, and those asked for, which must be there."""
    here = {
        name: function
        for name, function in inspect.getmembers(type(model), inspect.isfunction)
        if not hasattr(nn.Module, name) and not name.startswith("__")
    }
    unknown = [name for name in asked if name not in here and name != FORWARD]
    if unknown:
        raise ExportError(
            f"--methods names {', '.join(unknown)}, which {type(model).__name__} has not: "
            + (f"it has {', '.join(here)}" if here else "it has none besides forward")
            + ". A task's export_model(self, model) can give a model that has them"
        )
    marked = [
        name
        for name, function in here.items()
        if getattr(function, "_torchscript_modifier", None) == FunctionModifiers.EXPORT
    ]
    return tuple(sorted({*marked, *asked} - {FORWARD}))


def outputs_of(run: Runner, method: str, inputs: Inputs) -> Outputs:
    """What a method gives, flat; with the same draws whenever it is asked."""
    reseed(0)
    # A method may differentiate; forward alone has nothing to gain from a graph.
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
            f"the exported model gave a {type(value).__name__}: it can give tensors, and tuples, "
            "lists and dictionaries of them. Override export_model(self, model) to change that"
        )


def live_outputs(model: nn.Module, examples: Examples) -> dict[str, tuple[Outputs, ...]]:
    """What each method of a model gives on each of the batches."""

    def run(method: str, inputs: Inputs) -> Any:
        try:
            inspect.signature(getattr(model, method)).bind(*inputs)
        except TypeError as error:
            raise TaskError(
                f"{type(model).__name__}.{method} does not take what model_inputs gives, "
                f"{len(inputs)} argument(s): {error}. Override model_inputs(self, batch, method)"
            ) from None
        try:
            return model(*inputs) if method == FORWARD else getattr(model, method)(*inputs)
        except Exception as error:
            if method == FORWARD:
                raise
            raise TaskError(
                f"{type(model).__name__}.{method} failed on what model_inputs gives for it: "
                f"{error}. If it takes something else than forward does, override "
                "model_inputs(self, batch, method)"
            ) from error

    found = {
        method: tuple(outputs_of(run, method, inputs) for inputs in batches)
        for method, batches in examples.inputs.items()
    }
    for method, batches in found.items():
        if len({tuple(batch) for batch in batches}) > 1:
            raise TaskError(
                f"{type(model).__name__}.{method} gives other tensors on other batches, "
                + ", ".join(str(list(batch)) for batch in batches)
                + ": an exported model always gives the same ones"
            )
    return found
