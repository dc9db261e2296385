"""The directory of a study of many runs: one process at a time, and always of the same study."""

from __future__ import annotations

import errno
import hmac
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from samestep.checkpoint.directory_lock import DirectoryLock, Holder, holder_of
from samestep.checkpoint.files import write_whole
from samestep.checkpoint.ownership import claim
from samestep.config import Config
from samestep.config.schema import PLANNED_KEYS, SHAPING_KEYS
from samestep.environment.secret import make_key, read_key
from samestep.errors import RunDirError, TextError
from samestep.parsing.files import is_file
from samestep.parsing.json_text import parse_json, read_json

_COMPARED = (*SHAPING_KEYS, *PLANNED_KEYS, "batch_per_rank", "accumulation", "early_stopping", "evaluation", "best")
"""Keys of a config that shape what its runs come to."""
SWEEP = "sweep.json"
"""The file in a sweep's directory that holds its definition."""
STOP = "stop"
"""A file in the sweep's directory that stops it."""
_LEAST_SPACE = 64 * 1024
"""Bytes without which a disk is full."""


def shape_of(config: Config) -> dict[str, Any]:
    """Return what must be the same for two runs to belong to one study."""
    document = config.model_dump(mode="json")
    return {key: document[key] for key in _COMPARED if key in document}


@contextmanager
def locked(folder: Path, purpose: Literal["cv", "sweep"], report: Callable[[str], None]) -> Iterator[DirectoryLock]:
    """A directory of ours, for this process alone.

    Raises:
        RunDirError: if another process uses it, here or on another machine, or it is not ours.
    """
    claim(folder, purpose=purpose)
    advice = "Wait for it to end, or stop it; two would spoil it"
    lock = DirectoryLock(folder, f"{purpose}.lock", f"{folder}", advice, beats=True)
    try:
        if lock.taken_from is not None:
            report(f"taken over from {lock.taken_from.words()}, and who has not released it")
        yield lock
    finally:
        lock.release()


def sweep_folder(name: str) -> Path | None:
    """Return the directory of a sweep, by its path or its name in sweeps/; None if there is none."""
    here = Path(name)
    folder = here if here.is_dir() else Path("sweeps") / name
    return folder if is_file(folder / SWEEP) else None


def find_sweep(name: str) -> Path:
    """Return the directory of a sweep, by its path or its name.

    Raises:
        RunDirError: if there is none.
    """
    folder = sweep_folder(name)
    if folder is None:
        raise RunDirError(f"there is no sweep {name}: give its directory, or its name in sweeps/")
    return folder


def coordinator_of(folder: Path) -> Holder | None:
    """Return the process that runs the sweep of a directory, or has ended without releasing it; None if there is none."""
    return holder_of(folder / "sweep.lock")


def write_document(path: Path, document: Any) -> None:
    """Write JSON to a file: whole, or not at all."""
    write_whole(path, json.dumps(document, indent=1))


def signed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document by which this user knows again what they have started."""
    return {**document, "signature": _signature(document, make_key())}


def is_signed(document: Mapping[str, Any]) -> bool:
    """Return whether this user has written the document, and nobody has changed it."""
    rest = {key: value for key, value in document.items() if key != "signature"}
    expected = _signature(rest, read_key())
    return bool(expected) and hmac.compare_digest(expected, str(document.get("signature")))


def _signature(document: Mapping[str, Any], key: bytes | None) -> str:
    if key is None:
        return ""
    return hmac.new(key, json.dumps(document, sort_keys=True).encode(), "sha256").hexdigest()


def same_study(path: Path, definition: Mapping[str, Any]) -> None:
    """Keep what a study is, or refuse to continue another one.

    Raises:
        RunDirError: with what differs.
    """
    now = parse_json(json.dumps(definition))
    if not is_file(path):
        write_document(path, now)
        return
    try:
        before = read_json(path)
    except TextError as error:
        raise RunDirError(f"{path} {error}: what this study is cannot be read") from None
    different = list(_differences(before, now))
    if different:
        raise RunDirError(
            f"{path.parent} is of another study:\n  - "
            + "\n  - ".join(different)
            + "\nGive another name or directory, or make this one's the same again"
        )


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict) and (before or now):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    elif before != now:
        yield f"{path} was {_shown(before)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def is_full_disk(folder: Path, run: Path, reason: str) -> bool:
    """Return whether a run has failed because the disk of its study is full: that is no fault of its own.

    Args:
        reason: Why it failed. If it could not even write that, the disk is asked.
    """
    full = (errno.ENOSPC, errno.EDQUOT)
    if str(run) in reason and any(os.strerror(code) in reason for code in full):
        return True
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_LEAST_SPACE))
            file.flush()
    except OSError as error:
        return error.errno in full
    return False


def trial_folder(folder: Path, number: int) -> Path:
    """Return where a trial's runs are, in its sweep's directory."""
    return folder / "trials" / f"trial-{number:04d}"
