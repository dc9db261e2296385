"""Checkpoints: one directory each, whole or not there; no rank in any name or key.

checkpoints/step-00000120/model.safetensors     the weights, readable without samestep
                          training.pt           optimizers, schedules, position
                          manifest.json         checksums, written last
checkpoints/index.json                          which one is last, which one is best
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from samestep.errors import CheckpointError


@dataclass(frozen=True)
class CheckpointIndex:
    """Which checkpoints a run keeps, by directory name."""

    last: str | None = None
    best: str | None = None


class Checkpoints:
    """The checkpoints of one run, written by rank 0 only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def index(self) -> CheckpointIndex:
        path = self._folder / "index.json"
        return (
            CheckpointIndex(**json.loads(path.read_text())) if path.exists() else CheckpointIndex()
        )

    def save(
        self,
        step: int,
        model: nn.Module,
        training: Mapping[str, Any],
        *,
        best: bool = False,
        last: bool = False,
    ) -> Path:
        """Write a checkpoint whole, point to it, and remove those nothing points to."""
        name = f"step-{step:08d}"
        target = self._folder / name
        try:
            if not target.exists():
                self._write(target, model, training)
            before = self.index()
            after = CheckpointIndex(name if last else before.last, name if best else before.best)
            _replace_text(self._folder / "index.json", json.dumps(vars(after)))
            for old in {before.last, before.best} - {after.last, after.best, None}:
                shutil.rmtree(self._folder / str(old))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {target} could not be written: {error.strerror or error}. "
                "The checkpoints before it are whole"
            ) from error
        return target

    def _write(self, target: Path, model: nn.Module, training: Mapping[str, Any]) -> None:
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_model(model, str(partial / "model.safetensors"))
        torch.save(dict(training), partial / "training.pt")
        sums = {path.name: _sha256(path) for path in sorted(partial.iterdir())}
        (partial / "manifest.json").write_text(json.dumps({"sha256": sums}))
        for path in (*partial.iterdir(), partial):
            _sync(path)
        os.replace(partial, target)
        _sync(target.parent)


def load_checkpoint(folder: Path, model: nn.Module) -> dict[str, Any]:
    """Load the weights into the model; returns the training state. Runs no code from the files."""
    try:
        sums = json.loads((folder / "manifest.json").read_text())["sha256"]
        for name, expected in sums.items():
            if _sha256(folder / name) != expected:
                raise CheckpointError(f"checkpoint {folder}: {name} is not what was written")
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint: {error}") from error
    load_model(model, str(folder / "model.safetensors"))
    path = folder / "training.pt"
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return state


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    _sync(partial)
    os.replace(partial, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
