"""Selects a run's weights: as trained, or one of its averages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from samestep.checkpoint.format import read_model, read_tensors
from samestep.checkpoint.state import complete_model_state, require
from samestep.errors import CheckpointError

WEIGHTS = ("raw", "ema", "swa", "average")
"""As trained; the run's EMA; its SWA; the mean that `samestep average` wrote."""
AVERAGE_FILE = "average.safetensors"


def model_state(run: Path, folder: Path, weights: str, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the model with the chosen weights.

    Args:
        training: what `read_training` returned for the checkpoint.

    Raises:
        CheckpointError: if there are no such weights.
    """
    tensors = {**read_model(folder), **_averaged(run, folder, weights, training)}
    return complete_model_state(tensors, training)


def _averaged(run: Path, folder: Path, weights: str, training: Mapping[str, Any]) -> dict[str, Tensor]:
    if weights == "raw":
        return {}
    if weights not in WEIGHTS:
        raise CheckpointError(f"there are no weights {weights!r}: there are {', '.join(WEIGHTS)}")
    if weights == "average":
        path = run / AVERAGE_FILE
        if not path.is_file():
            raise CheckpointError(f"{run} holds no {AVERAGE_FILE}: samestep average {run} writes it")
        return read_tensors(path)
    require(training, "kept")
    averaged = training["kept"].get(weights)
    found = averaged.get("model") if isinstance(averaged, Mapping) else None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"{folder} holds no {weights} weights: the run had no {weights}: section"
            + (", or it had not started" if weights == "swa" else "")
        )
    return found
