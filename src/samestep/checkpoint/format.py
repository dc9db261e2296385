"""One checkpoint on disk: a directory that is complete or absent. No rank in any name or key.

    step-00000120/model.safetensors    the weights, readable without samestep
                  training.pt          optimizers, schedules, position and everything else
                  manifest.json        what it is, and the checksums of the others; written last

Where parameters have owners, it is written in parts (`checkpoint.parts`).
Reading runs no code from the files: safetensors, JSON, and torch.load(weights_only=True).
"""

from __future__ import annotations

import errno
import json
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from samestep.checkpoint.files import DigestedFile, Files
from samestep.checkpoint.manifest import MANIFEST, MODEL, PARTIAL, TRAINING, Manifest
from samestep.checkpoint.parts import WHOLE, Part, Patience, Sums, await_parts, files_of, merged, write_receipt
from samestep.errors import CheckpointError
from samestep.parsing.limits import short


def write_checkpoint(
    files: Files,
    folder: Path,
    model: Mapping[str, Tensor],
    training: Mapping[str, Any],
    manifest: Manifest,
    part: Part = WHOLE,
    patience: Patience | None = None,
) -> None:
    """Write a checkpoint under a temporary name, and rename it once it is on the disk.

    Args:
        part: that of rank 0, if others write, too; then `folder` exists already, under its temporary name.
        patience: how long to wait for the others.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    write_files(files, partial, model, training, manifest, part, patience)
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
    part: Part = WHOLE,
    patience: Patience | None = None,
) -> None:
    """Write a checkpoint's files into a directory that nobody takes for one, and sync them."""
    if part.of == 1:
        files.remove(partial)
        files.make_folder(partial)
    sums = _write_states(files, partial, model, training, part)
    if part.of > 1:
        sums |= await_parts(files, partial, part, [*model], patience or Patience())
    text = Manifest(**{**vars(manifest), "files": sums}).text()
    with DigestedFile(files, partial / MANIFEST) as file:
        file.write(text.encode())
    files.sync(partial / MANIFEST)
    files.sync(partial)


def write_part(
    files: Files, partial: Path, model: Mapping[str, Tensor], training: Mapping[str, Any], part: Part
) -> None:
    """Write the part of another rank than 0, and a receipt for it."""
    try:
        sums = _write_states(files, partial, model, training, part)
    except Exception as error:
        with suppress(OSError):  # the same disk: rank 0 learns of it when this rank ends
            write_receipt(files, partial, part, {}, [], error)
        raise
    write_receipt(files, partial, part, sums, [*model] if part.splits_model else [])


def _write_states(
    files: Files, partial: Path, model: Mapping[str, Tensor], training: Mapping[str, Any], part: Part
) -> Sums:
    sums: Sums = {}
    if part.model_file is not None:
        with DigestedFile(files, partial / part.model_file) as file:
            write_safetensors(file, model)
        sums[part.model_file] = (file.sha256, file.size)
    with DigestedFile(files, partial / part.training_file) as file:
        save_by_torch(dict(training), file)
    sums[part.training_file] = (file.sha256, file.size)
    for name in sums:
        files.sync(partial / name)
    return sums


def save_by_torch(state: dict[str, Any], file: DigestedFile) -> None:
    """Write a state as `torch.save` does; raises the file's own error."""
    try:
        torch.save(state, file)  # type: ignore[arg-type]
    except RuntimeError:
        if file.error is not None:  # torch's zip writer hides the real error
            raise file.error from None
        raise


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
            raise CheckpointError(f"{name} is of type {tensor.dtype}, which safetensors does not have")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for _, tensor in ordered:
        if tensor.numel():
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def read_model(folder: Path) -> dict[str, Tensor]:
    """Return the model's tensors in a checkpoint, in host memory; read when they are used."""
    parts = [read_tensors(path) for path in files_of(folder, MODEL)]
    return {name: tensor for part in parts for name, tensor in part.items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, in host memory; raises a `CheckpointError`."""
    try:
        return load_file(path)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {short(str(error))}") from None


def _why_unread(error: Exception) -> str:
    """Return why torch does not unpickle a file; not how to make it do so, which its own text begins with."""
    found = re.search(r"(?i)unsupported (?:global|class|operand|operator|type)[^\n]*", str(error))
    first = next(iter(str(error).strip().splitlines()), "")
    if found is None and "weights_only" in first:
        return type(error).__name__
    return short((found[0] if found else first) or type(error).__name__).partition(" Please use")[0]


_TRAINING_KINDS: dict[str, type] = {
    "model": dict, "shared": dict, "modules": list, "optimizers": list, "schedules": list, "kept": dict,
}  # fmt: skip


def read_training(folder: Path) -> dict[str, Any]:
    """Everything but the model's tensors in a checkpoint, in host memory; runs no code from it.

    Of a checkpoint in parts, tensors that ranks own are read from the disk when they are used: a rank uses its own.
    """
    first, *others = files_of(folder, TRAINING)
    state = _read_state(first)
    for path in others:
        state = merged(state, _read_state(path, mmap=True))
    return state


def _read_state(path: Path, mmap: bool = False) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:  # an unpickler fails on bad bytes in too many ways to list
        raise CheckpointError(
            f"{path} cannot be read without running code from it, which is never done: {_why_unread(error)}"
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not the state of a run: it holds a {type(state).__name__}")
    for name, kind in _TRAINING_KINDS.items():
        if not isinstance(state.get(name, kind()), kind):
            found = type(state[name]).__name__
            raise CheckpointError(f"{path} is not the state of a run: {name} is a {found}")
    return state
