"""One checkpoint on disk: a directory that is complete or absent. No rank in any name or key.

    step-00000120/model.safetensors    the weights, readable without samestep
                  training.pt          optimizers, schedules, position and everything else
                  manifest.json        what it is, and the checksums of the others; written last

Reading runs no code from the files: safetensors, JSON, and torch.load(weights_only=True).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from samestep.checkpoint.files import DigestedFile, Files, sha256_of
from samestep.errors import CheckpointError

FORMAT = 1
MODEL, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Best:
    """The step with the best evaluation so far."""

    step: int
    metric: str
    value: float


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and how it came about."""

    step: int
    """Completed steps."""
    epoch: int
    """Completed epochs."""
    world: int
    """Ranks of the run when this was written; any other number can resume from it."""
    saved_at: float
    """Seconds since 1970."""
    metrics: Mapping[str, Any]
    """The last evaluation's values."""
    best: Best | None
    ended: str | None
    """Why the run ended with this step; None if it did not."""
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    versions: Mapping[str, str]
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Checksum and size of each file."""
    measured: int | None = None
    """The step whose weights the metrics are of; None if nothing was evaluated yet."""

    def value_of(self, metric: str) -> float | None:
        """The value of a metric for these very weights; None if they were not evaluated."""
        value = self.metrics.get(metric) if self.measured == self.step else None
        usable = isinstance(value, (int, float)) and not math.isnan(value)
        return float(value) if usable else None  # type: ignore[arg-type]

    def text(self) -> str:
        """The content of `manifest.json`, with its own checksum."""
        # Through JSON first, which turns keys into text: the digest must match what is read.
        document = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({"sha256": _digest(document), **document}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint; raises a `CheckpointError` with what is wrong with it."""
        try:
            document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            expected = document.pop("sha256")
            if expected != _digest(document):
                raise CheckpointError(f"{MANIFEST} is not what was written")
            number = document.pop("format")
            if number != FORMAT:
                raise CheckpointError(
                    f"it is of format {number}, and this samestep reads {FORMAT}: "
                    "use the version that wrote it"
                )
            best = document.pop("best")
            files = {name: (digest, size) for name, (digest, size) in document.pop("files").items()}
            return cls(**document, best=best and Best(**best), files=files)
        except FileNotFoundError:
            raise CheckpointError(f"it has no {MANIFEST}") from None
        except OSError as error:
            raise CheckpointError(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}") from None


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def folder_name(step: int) -> str:
    """The name of a step's directory: `step-00000120`."""
    return f"step-{step:08d}"


def write_checkpoint(
    files: Files,
    folder: Path,
    model: Mapping[str, Tensor],
    training: Mapping[str, Any],
    manifest: Manifest,
) -> None:
    """Write a checkpoint under a temporary name, and rename it once it is on the disk.

    Args:
        files: the file operations.
        folder: the checkpoint's directory, named by `folder_name`.
        model: the model's tensors, in host memory.
        training: everything else that the run needs to resume.
        manifest: what the checkpoint is; checksums are added.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    files.remove(partial)
    files.make_folder(partial)
    sums: dict[str, tuple[str, int]] = {}
    with DigestedFile(files, partial / MODEL) as file:
        write_safetensors(file, model)
    sums[MODEL] = (file.sha256, file.size)
    with DigestedFile(files, partial / TRAINING) as file:
        try:
            torch.save(dict(training), file)  # type: ignore[arg-type]
        except RuntimeError:
            if file.error is not None:  # torch's zip writer hides the real error
                raise file.error from None
            raise
    sums[TRAINING] = (file.sha256, file.size)
    for name in sums:
        files.sync(partial / name)
    text = Manifest(**{**vars(manifest), "files": sums}).text()
    with DigestedFile(files, partial / MANIFEST) as file:
        file.write(text.encode())
    files.sync(partial / MANIFEST)
    files.sync(partial)
    # Only a run that repeats this step finds the name taken, by a damaged checkpoint; the older
    # one that it resumed from is still there.
    files.remove(folder)
    files.replace(partial, folder)
    files.sync(folder.parent)


# Torch's types, with their names in the safetensors format.
_TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write_safetensors(
    file: DigestedFile, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors in the safetensors format, one by one: its library would copy all of them first.

    Args:
        file: the file to write to.
        tensors: by name, in host memory.
        metadata: texts to keep in the file's header.

    Raises:
        CheckpointError: for a type of tensor that the format does not have.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    # In the library's order: wide types first keeps every tensor aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        if tensor.dtype not in _TYPES:
            raise CheckpointError(
                f"{name} is of type {tensor.dtype}, which safetensors does not have"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for _, tensor in ordered:
        if tensor.numel():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def verify_checkpoint(folder: Path, *, checksums: bool = True) -> Manifest:
    """Check that a checkpoint is complete and unchanged.

    Args:
        folder: the checkpoint's directory.
        checksums: whether to read every byte; otherwise only the sizes are compared.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: if anything is not as it was written.
    """
    manifest = Manifest.read(folder)
    for name, (digest, size) in manifest.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                raise CheckpointError(f"{name} has {found} bytes and was written with {size}")
            if checksums and sha256_of(path) != digest:
                raise CheckpointError(f"{name} is not what was written (checksum)")
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from None
    return manifest


def read_model(folder: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, in host memory."""
    try:
        return load_file(folder / MODEL)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / MODEL} cannot be read: {error}") from None


def read_training(folder: Path) -> dict[str, Any]:
    """Everything but the model's tensors in a checkpoint, in host memory; runs no code from it."""
    path = folder / TRAINING
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        return state
    except Exception as error:  # an unpickler fails on bad bytes in too many ways to list
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{path} cannot be read without running code from it, which is never done: {reason}"
        ) from None
