"""One checkpoint on disk: a directory that is complete or absent. No rank in any name or key.

    step-00000120/model.safetensors    the weights, readable without samestep
                  training.pt          optimizers, schedules, position and everything else
                  manifest.json        what it is, and the checksums of the others; written last

Reading runs no code from the files: safetensors, JSON, and torch.load(weights_only=True).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from stat import S_ISREG
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from samestep.checkpoint.files import DigestedFile, Files, sha256_of
from samestep.errors import CheckpointError, TextError
from samestep.foreign.files import is_file
from samestep.foreign.json_text import parse_json, read_json
from samestep.foreign.limits import short

FORMAT = 1
MODEL, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"
PARTIAL = ".partial"
SURVIVOR = ".survivor-"
"""Before the rank in the name under which a survivor of lost ranks writes."""


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
        document = parse_json(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({"sha256": _digest(document), **document}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint; raises a `CheckpointError` with what is wrong with it."""
        try:
            document = read_json(folder / MANIFEST)
        except TextError as error:
            missing = not is_file(folder / MANIFEST)
            why = f"it has no {MANIFEST}" if missing else f"{MANIFEST} is damaged: it {error}"
            raise CheckpointError(why) from None
        if not isinstance(document, dict):
            raise CheckpointError(f"{MANIFEST} is damaged: it holds no object")
        if document.pop("sha256", None) != _digest(document):
            raise CheckpointError(f"{MANIFEST} is not what was written")
        number = document.pop("format", None)
        if number != FORMAT:
            raise CheckpointError(
                f"it is of format {short(str(number))}, and this samestep reads {FORMAT}: "
                "use the version that wrote it"
            )
        return cls(**_typed(document))


_COUNT, _NUMBER, _TEXT = (int,), (int, float), (str,)
_KINDS: dict[str, tuple[type, ...]] = {
    "step": _COUNT, "epoch": _COUNT, "world": _COUNT, "saved_at": _NUMBER, "metrics": (dict,),
    "best": (dict, NoneType), "ended": (str, NoneType), "config": (dict,), "plan": (dict,), "versions": (dict,),
    "files": (dict,), "measured": (int, NoneType),
}  # fmt: skip
_ADDED_LATER = ("files", "measured")
_BEST = {"step": _COUNT, "metric": _TEXT, "value": _NUMBER}
_MOST = 10**13
"""Above every count."""
_LAST_TIME = 250_000_000_000
"""Seconds since 1970 that a calendar can show."""


def _typed(document: dict[str, Any]) -> dict[str, Any]:
    """The fields of a manifest; raises if one is not of its kind: a checksum keeps no author out."""
    _check_fields("", document, _KINDS, _ADDED_LATER)
    best, files = document["best"], document.get("files", {})
    if not document["saved_at"] < _LAST_TIME:
        raise CheckpointError(f"{MANIFEST} is damaged: it has saved_at: {document['saved_at']}")
    if best is not None:
        _check_fields("best.", best, _BEST)
    for name, entry in files.items():
        sound = isinstance(entry, list) and [type(part) for part in entry] == [str, int]
        if not sound or PurePath(name).name != name:
            raise CheckpointError(
                f"{MANIFEST} is damaged: files has {short(repr(name))}: {entry!r:.80}"
            )
    _check_fields("versions.", document["versions"], dict.fromkeys(document["versions"], _TEXT))
    threads = document["plan"].get("threads_per_rank", 1)
    _check_fields("plan.", {"threads_per_rank": threads}, {"threads_per_rank": _COUNT})
    found = {name: (digest, size) for name, (digest, size) in files.items()}
    return {**document, "best": None if best is None else Best(**best), "files": found}


def _check_fields(
    prefix: str,
    found: Mapping[str, Any],
    kinds: Mapping[str, tuple[type, ...]],
    optional: Sequence[str] = (),
) -> None:
    names = [*kinds, *(name for name in found if name not in kinds)]
    for name in names:
        if name not in found and name not in optional:
            raise CheckpointError(f"{MANIFEST} is damaged: it has no {prefix}{name}")
        if name in found and not _fits(found[name], kinds.get(name, ()), prefix != "best."):
            shown = f"{short(prefix + name)}: {short(repr(found[name]), 80)}"
            raise CheckpointError(f"{MANIFEST} is damaged: it has {shown}")


def _fits(value: Any, kinds: tuple[type, ...], is_limited: bool) -> bool:
    if type(value) not in kinds:
        return False
    is_number = isinstance(value, (int, float)) and (is_limited or isinstance(value, int))
    return not is_number or 0 <= value < _MOST


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
    write_files(files, partial, model, training, manifest)
    # Only a run that repeats this step finds the name taken, by a damaged checkpoint; the older
    # one that it resumed from is still there.
    files.remove(folder)
    put_in_place(files, partial, folder)


def write_files(
    files: Files,
    partial: Path,
    model: Mapping[str, Tensor],
    training: Mapping[str, Any],
    manifest: Manifest,
) -> None:
    """Write a checkpoint's files into a directory that nobody takes for one, and sync them."""
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


def put_in_place(files: Files, partial: Path, folder: Path) -> None:
    """Give a written checkpoint its name, unless another rank has just done so with the same one."""
    try:
        files.replace(partial, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        files.remove(partial)
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
            found = path.stat()
            if not S_ISREG(found.st_mode):  # a pipe would never end
                raise CheckpointError(f"{name} is no plain file")
            if found.st_size != size:
                raise CheckpointError(
                    f"{name} has {found.st_size} bytes and was written with {size}"
                )
            if checksums and sha256_of(path) != digest:
                raise CheckpointError(f"{name} is not what was written (checksum)")
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from None
    return manifest


def read_model(folder: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, in host memory."""
    return read_tensors(folder / MODEL)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in host memory; raises a `CheckpointError`."""
    try:
        return load_file(path)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {short(str(error))}") from None


_TRAINING_KINDS: dict[str, type] = {
    "model": dict, "shared": dict, "modules": list, "optimizers": list, "schedules": list, "kept": dict,
}  # fmt: skip


def read_training(folder: Path) -> dict[str, Any]:
    """Everything but the model's tensors in a checkpoint, in host memory; runs no code from it."""
    path = folder / TRAINING
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # an unpickler fails on bad bytes in too many ways to list
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{path} cannot be read without running code from it, which is never done: {short(reason)}"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} is not the state of a run: it holds a {type(state).__name__}"
        )
    for name, kind in _TRAINING_KINDS.items():
        if not isinstance(state.get(name, kind()), kind):
            found = type(state[name]).__name__
            raise CheckpointError(f"{path} is not the state of a run: {name} is a {found}")
    return state
