"""safetensors: the weights alone, for programs that have the model's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from samestep.errors import ExportError
from samestep.models.export.examples import Inputs
from samestep.models.export.subject import METADATA_KEY, Built, Runner, Subject

SUFFIX = ".safetensors"


def build(subject: Subject) -> Built:
    """Return the model's state under its own names, for a plain load_state_dict."""
    state = subject.model.state_dict()
    others = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if others:
        raise ExportError(
            f"the state of {type(subject.model).__name__} holds {', '.join(others)}, which are not "
            "tensors: safetensors holds nothing else. Use --to torchscript or pt2"
        )

    def save(path: Path, metadata: str) -> None:
        # A shared tensor is written under each name: a plain load_state_dict needs that.
        copies = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        save_file(copies, path, {"format": "pt", METADATA_KEY: metadata})

    return Built("weights only", (), save)


def load(path: Path, subject: Subject) -> Runner:
    """Load the weights of a file into a new model of the task."""
    model = subject.fresh()
    model.load_state_dict(load_file(path, device=str(subject.device)))

    def run(_: str, inputs: Inputs) -> Any:
        return model(*inputs)

    return run
