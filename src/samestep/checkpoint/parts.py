"""A checkpoint in parts: where parameters have owners (`distributed.shard`), every rank writes what it owns.

    step-00000120/training.pt                          what every rank holds, and what rank 0 owns
                  training-00002-of-00004.pt           what another rank owns
                  model-00001-of-00004.safetensors     in place of model.safetensors, if weights have owners,
                  model.safetensors.index.json         with an index that other programs know

Ranks write side by side. Each says in a receipt that its part is on the disk; rank 0 waits for all of them,
writes the manifest with all checksums, and renames the directory. Names are those of parameters and their
numbers, so any world size reads it, with any `distributed.shard`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import DigestedFile, Files
from samestep.checkpoint.manifest import MODEL, PARTIAL, TRAINING
from samestep.foreign.json_text import read_json

INDEX = f"{MODEL}.index.json"
_SECONDS_BETWEEN_LOOKS = 0.02

Sums = dict[str, tuple[str, int]]
"""Checksum and size of each file."""


class Abandoned(Exception):
    """Not all parts of a checkpoint came, and nobody waits for them any more: the run has failed."""


@dataclass(frozen=True)
class Part:
    """Which part of a checkpoint a rank writes."""

    number: int = 0
    of: int = 1
    splits_model: bool = False
    """Whether the model's weights are in parts, too."""

    @property
    def model_file(self) -> str | None:
        """The file of this part's tensors of the model, if it has any."""
        if self.splits_model:
            return self._named(MODEL)
        return MODEL if self.number == 0 else None

    @property
    def training_file(self) -> str:
        """The file of the rest."""
        return TRAINING if self.number == 0 else self._named(TRAINING)

    @property
    def receipt(self) -> str:
        """The file that says that this part is on the disk."""
        return f"part-{self.number + 1:05d}.json"

    def others(self) -> list[Part]:
        """Return the parts of all other ranks, for rank 0."""
        return [Part(number, self.of, self.splits_model) for number in range(1, self.of)]

    def _named(self, file: str) -> str:
        name = Path(file)
        return f"{name.stem}-{self.number + 1:05d}-of-{self.of:05d}{name.suffix}"


WHOLE = Part()


def files_of(folder: Path, file: str) -> list[Path]:
    """Return the files that hold all that would be in one file, were there no parts."""
    name = Path(file)
    found = sorted(folder.glob(f"{name.stem}-*-of-*{name.suffix}"))
    whole = folder / file
    return [whole, *found] if whole.exists() or not found else found


def write_receipt(
    files: Files, partial: Path, part: Part, sums: Sums, tensors: list[str], error: str = ""
) -> None:
    """Say that a part is on the disk, or why it is not."""
    path = partial / part.receipt
    with DigestedFile(files, path.with_name(path.name + PARTIAL)) as file:
        file.write(json.dumps({"files": sums, "tensors": tensors, "error": error}).encode())
    files.replace(path.with_name(path.name + PARTIAL), path)


def await_parts(
    files: Files, partial: Path, part: Part, tensors: list[str], abandoned: threading.Event
) -> Sums:
    """Wait for the parts of all other ranks; write the index of the model's tensors if they are in parts.

    Args:
        files: The file operations.
        partial: The directory that all ranks write to.
        part: That of rank 0.
        tensors: The names of the model's tensors in it.
        abandoned: Set once nobody waits for the checkpoint any more: a rank is gone.

    Returns:
        The checksums of the others' files, and of the index.

    Raises:
        Abandoned: if a part did not come.
        OSError: if another rank could not write its own.
    """
    sums: Sums = {}
    places = dict.fromkeys(tensors, part.model_file)
    for other in part.others():
        path = partial / other.receipt
        while not path.exists():
            if abandoned.wait(_SECONDS_BETWEEN_LOOKS):
                raise Abandoned(f"part {other.number + 1} of {part.of} was not written")
        said = read_json(path)
        if said["error"]:
            raise OSError(0, f"part {other.number + 1} of {part.of}: {said['error']}")
        sums |= {name: (digest, size) for name, (digest, size) in said["files"].items()}
        places |= dict.fromkeys(said["tensors"], other.model_file)
        files.remove(path)
    if part.splits_model:
        with DigestedFile(files, partial / INDEX) as file:
            file.write(json.dumps({"metadata": {}, "weight_map": places}, indent=1).encode())
        files.sync(partial / INDEX)
        sums[INDEX] = (file.sha256, file.size)
    return sums


def merged(whole: Any, part: Any) -> Any:
    """Return what is in one of two states, or in both: dicts by key, lists by place; else the first one's."""
    if isinstance(whole, Mapping) and isinstance(part, Mapping):
        both = {key: merged(whole[key], part[key]) for key in whole if key in part}
        return {**part, **whole, **both}
    if isinstance(whole, list) and isinstance(part, list) and len(whole) == len(part):
        return [merged(one, other) for one, other in zip(whole, part, strict=True)]
    return whole
