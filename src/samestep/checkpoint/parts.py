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
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import DigestedFile, Files
from samestep.checkpoint.manifest import MANIFEST, MODEL, PARTIAL, TRAINING
from samestep.errors import CheckpointError, PeerLost
from samestep.parsing.json_text import read_json

INDEX = f"{MODEL}.index.json"
_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_BETWEEN_QUESTIONS = 0.25
_SECONDS_WITHOUT_A_CHANGE = 30.0
"""Seconds after which a run that ends gives up a part of which nothing more is written."""

Sums = dict[str, tuple[str, int]]
"""Checksum and size of each file."""


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint that a rank writes."""

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


def _nobody(rank: int) -> bool:
    """No rank is known to be gone."""
    del rank
    return False


class Patience:
    """Rank 0's wait for the part of another rank: until it is written, or that rank is gone.

    A run that ends does not wait for ranks that neither write nor are known to be gone.

    Args:
        is_gone: Returns whether a rank has ended, or is not heard from any more. Called from another thread.
        seconds: How long a run that ends waits for files that do not change.
    """

    def __init__(self, is_gone: Callable[[int], bool] = _nobody, seconds: float = _SECONDS_WITHOUT_A_CHANGE) -> None:
        self._is_gone, self._seconds = is_gone, seconds
        self.ending = threading.Event()
        """Set once the run ends by an error."""

    def wait(self, partial: Path, other: Part) -> None:
        """Wait for the receipt of another part.

        Raises:
            PeerLost: if it will not come.
        """
        sizes, changed = _sizes(partial), time.monotonic()
        asked = changed
        while other.receipt not in sizes:
            # First whether it has ended, then once more whether it has written: it may have done both.
            why = ""
            if time.monotonic() - asked > _SECONDS_BETWEEN_QUESTIONS:  # which ask the store of the ranks
                why = self._why_not(other.number, changed)
                asked = time.monotonic()
            before, sizes = sizes, _sizes(partial)
            if sizes != before:
                changed = time.monotonic()
            if why and other.receipt not in sizes:
                raise PeerLost(f"part {other.number + 1} of {other.of} was not written: {why}")
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _why_not(self, rank: int, changed: float) -> str:
        if self._is_gone(rank):
            return f"rank {rank} is gone"
        if self.ending.is_set() and time.monotonic() - changed > self._seconds:
            return f"nothing came from rank {rank} for {self._seconds:g} s"
        return ""


def _sizes(folder: Path) -> dict[str, int]:
    """Return the files of a directory with their sizes; a look at each by name may be answered from a cache."""
    sizes = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # just renamed: it is seen at the next look
                sizes[entry.name] = entry.stat().st_size
    return sizes


def files_of(folder: Path, file: str) -> list[Path]:
    """Return the files that hold all that would be in one file, were there no parts.

    Raises:
        CheckpointError: if there are parts of two checkpoints.
    """
    name = Path(file)
    found = sorted(folder.glob(f"{name.stem}-*-of-*{name.suffix}"))
    if len({path.stem.rpartition("-of-")[2] for path in found}) > 1:
        raise CheckpointError(
            f"{folder} holds parts of two checkpoints, {found[0].name} and {found[-1].name}: remove those "
            f"that {MANIFEST} does not list"
        )
    whole = folder / file
    return [whole, *found] if whole.exists() or not found else found


def write_receipt(
    files: Files, partial: Path, part: Part, sums: Sums, tensors: list[str], error: Exception | None = None
) -> None:
    """Say that a part is on the disk, or why it is not."""
    why = "" if error is None else getattr(error, "strerror", None) or str(error) or repr(error)
    receipt = {"files": sums, "tensors": tensors, "error": why, "is_disk": isinstance(error, OSError)}
    path = partial / part.receipt
    with DigestedFile(files, path.with_name(path.name + PARTIAL)) as file:
        file.write(json.dumps(receipt).encode())
    files.replace(path.with_name(path.name + PARTIAL), path)


def await_parts(files: Files, partial: Path, part: Part, tensors: list[str], patience: Patience) -> Sums:
    """Wait for the parts of all other ranks; write the index of the model's tensors if they are in parts.

    Returns:
        The checksums of the others' files, and of the index.

    Raises:
        PeerLost: if a part does not come.
        OSError: if another rank's disk did not take its own.
        CheckpointError: if another rank failed to write its own.
    """
    sums: Sums = {}
    places = dict.fromkeys(tensors, part.model_file)
    for other in part.others():
        path = partial / other.receipt
        patience.wait(partial, other)
        receipt = read_json(path)
        if receipt["error"]:
            message = f"part {other.number + 1} of {part.of}: {receipt['error']}"
            raise OSError(0, message) if receipt["is_disk"] else CheckpointError(message)
        sums |= {name: (digest, size) for name, (digest, size) in receipt["files"].items()}
        places |= dict.fromkeys(receipt["tensors"], other.model_file)
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
