"""Compares a file's outputs with the model's, on real batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samestep.errors import ExportDiffers
from samestep.models.export.examples import Inputs
from samestep.models.export.subject import Outputs, Runner, Subject, outputs_of

TOLERANCES = {
    torch.float64: 1e-9, torch.complex128: 1e-9,
    torch.float32: 1e-4, torch.complex64: 1e-4,
    torch.float16: 1e-2, torch.bfloat16: 1e-2,
}  # fmt: skip
"""How far a value may be off, relative to the largest value of its tensor; other types: not at all."""


@dataclass(frozen=True)
class Agreement:
    """The distance of a file's outputs from the model's."""

    exact: bool
    """Whether every value was equal."""
    largest_difference: float
    methods: dict[str, float]
    """The largest difference of each method."""


def check(run: Runner, subject: Subject) -> Agreement:
    """Compare every method on every batch.

    Raises:
        ExportDiffers: with the first place where the file differs.
    """
    methods = {}
    for method, batches in subject.outputs.items():
        inputs = subject.examples.inputs[method]
        found = [
            _compare(f"{method} on a batch of {size}", expected, _run(run, method, arguments, size))
            for size, expected, arguments in zip(subject.examples.sizes, batches, inputs, strict=True)
        ]
        methods[method] = max(found)
    largest = max(methods.values())
    return Agreement(largest == 0, largest, methods)


def _run(run: Runner, method: str, inputs: Inputs, size: int) -> list[Tensor]:
    try:
        return list(outputs_of(run, method, inputs).values())
    except Exception as error:  # each runtime has its own errors
        raise ExportDiffers(f"the file fails in {method} on a batch of {size}: {error}") from error


def _compare(where: str, expected: Outputs, found: list[Tensor]) -> float:
    if len(found) != len(expected):
        raise ExportDiffers(f"{where}: the file gives {len(found)} tensors and the model {len(expected)}")
    return max(
        (_difference(f"{where}, {name}", mine, its) for (name, mine), its in zip(expected.items(), found, strict=True)),
        default=0.0,
    )


def _difference(where: str, expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of two tensors, if it is small enough."""
    expected, found = expected.cpu(), found.cpu()
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        raise ExportDiffers(f"{where}: the file gives {_kind(found)} and the model {_kind(expected)}")
    same = (expected == found) | (expected.isnan() & found.isnan())
    if same.all():
        return 0.0
    apart = (_exact(expected) - _exact(found)).abs().masked_fill(same, 0.0)
    apart = apart.nan_to_num(nan=float("inf"))
    largest = float(apart.max())
    finite = _exact(expected).abs().nan_to_num(nan=0.0, posinf=0.0)
    allowed = TOLERANCES.get(expected.dtype, 0.0) * float(finite.max())
    if largest > allowed:
        place = torch.unravel_index(apart.argmax(), apart.shape)
        raise ExportDiffers(
            f"{where}, at {[int(index) for index in place]}: the file gives "
            f"{_shown(found[place])} and the model {_shown(expected[place])}; "
            f"{allowed:.3g} is allowed between them"
        )
    return largest


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shown(value: Tensor) -> Any:
    number = value.item()
    return f"{number:.9g}" if isinstance(number, float) else number
