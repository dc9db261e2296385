"""TorchScript: a model that C++ runs, with methods besides forward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from samestep.errors import ExportError
from samestep.export.examples import FORWARD, Inputs
from samestep.export.formats import METADATA_FILE, Built, reason
from samestep.export.subject import Runner, Subject

SUFFIX = ".ts"


def build(subject: Subject) -> Built:
    """Script the model, which keeps its branches and methods; or else trace it, and say so."""
    for name in subject.methods:
        torch.jit.export(getattr(type(subject.model), name))
    with _without_farewell():
        try:
            return _built(torch.jit.script(subject.model), "scripted", ())
        except Exception as error:  # the compiler refuses Python in more ways than one can list
            why = reason(error)
        traced = _traced(subject, why)
    note = (
        f"it could not be scripted ({why}), so it was traced: the file holds the path that one "
        "batch takes, without branches"
    )
    return _built(traced, "traced", (note,))


def _traced(subject: Subject, why: str) -> Any:
    inputs = subject.examples.inputs[FORWARD][0]
    try:
        with torch.no_grad():
            # We compare by ourselves, on other batches too.
            return torch.jit.trace(subject.model, inputs, check_trace=False, strict=False)
    except Exception as error:
        kept = f" with its methods {', '.join(subject.methods)}" if subject.methods else ""
        raise ExportError(
            f"{type(subject.model).__name__} can be neither scripted nor traced{kept}. "
            f"Scripting: {why}. Tracing: {reason(error)}. Change the model, or give another one "
            "in the task's export_model(self, model)"
        ) from error


def _built(module: Any, how: str, notes: tuple[str, ...]) -> Built:
    def save(path: Path, metadata: str) -> None:
        with _without_farewell():
            torch.jit.save(module, str(path), _extra_files={METADATA_FILE: metadata})

    return Built(how, notes, save)


def load(path: Path, subject: Subject) -> Runner:
    """The model in a file."""
    with _without_farewell():
        module: Any = torch.jit.load(str(path), map_location=subject.device)

    def run(method: str, inputs: Inputs) -> Any:
        return module(*inputs) if method == FORWARD else getattr(module, method)(*inputs)

    return run


@contextmanager
def _without_farewell() -> Iterator[None]:
    """Without torch's advice to leave torch.jit: C++ with methods has no other way yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)", DeprecationWarning
        )
        yield
