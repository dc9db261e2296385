"""TorchScript: a model that C++ can run, with methods besides forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from samestep.errors import ExportError
from samestep.models.export.examples import FORWARD, Inputs
from samestep.models.export.subject import METADATA_FILE, Built, Runner, Subject, reason

SUFFIX = ".ts"


def build(subject: Subject) -> Built:
    """Script the model, which keeps its branches and methods; or else trace it, with a note."""
    for name in subject.methods:
        torch.jit.export(getattr(type(subject.model), name))
    with _without_deprecation():
        try:
            return _built(torch.jit.script(subject.model), "scripted", ())
        except Exception as error:  # the compiler refuses Python in too many ways to list
            why = reason(error)
        traced = _trace(subject, why)
    note = (
        f"it could not be scripted ({why}), so it was traced: the file holds the path that one "
        "batch takes, without branches"
    )
    return _built(traced, "traced", (note,))


def _trace(subject: Subject, why: str) -> Any:
    inputs = subject.examples.inputs[FORWARD][0]
    try:
        with torch.no_grad():
            # We compare it ourselves, on other batches too.
            return torch.jit.trace(subject.model, inputs, check_trace=False, strict=False)
    except Exception as error:
        kept = f" with its methods {', '.join(subject.methods)}" if subject.methods else ""
        raise ExportError(
            f"{type(subject.model).__name__} can be neither scripted nor traced{kept}. "
            f"Scripting: {why}. Tracing: {reason(error)}. Change the model, or return another "
            "one from the task's export_model(self, model)"
        ) from error


def _built(module: Any, how: str, notes: tuple[str, ...]) -> Built:
    def save(path: Path, metadata: str) -> None:
        with _without_deprecation():
            torch.jit.save(module, str(path), _extra_files={METADATA_FILE: metadata})

    return Built(how, notes, save)


def load(path: Path, subject: Subject) -> Runner:
    """Load the model in a file."""
    with _without_deprecation():
        module: Any = torch.jit.load(str(path), map_location=subject.device)

    def run(method: str, inputs: Inputs) -> Any:
        return module(*inputs) if method == FORWARD else getattr(module, method)(*inputs)

    return run


@contextmanager
def _without_deprecation() -> Iterator[None]:
    """Without torch.jit's deprecation warnings: nothing else exports methods for C++ yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)", DeprecationWarning)
        yield
