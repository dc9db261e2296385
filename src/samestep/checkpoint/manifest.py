"""The manifest of a checkpoint, and the check that its files are those that were written.

No torch here: checkpoints are listed in a moment, and on machines that only launch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from stat import S_ISREG
from types import NoneType
from typing import Any

from samestep.checkpoint.files import sha256_of
from samestep.errors import CheckpointError, TextError
from samestep.parsing.files import is_file
from samestep.parsing.json_text import parse_json, read_json
from samestep.parsing.limits import short

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
    """The contents of a checkpoint, and how it came about."""

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
        """Return the value of a metric for these very weights; None if they were not evaluated."""
        value = self.metrics.get(metric) if self.measured == self.step else None
        usable = isinstance(value, (int, float)) and not math.isnan(value)
        return float(value) if usable else None  # type: ignore[arg-type]

    def text(self) -> str:
        """Return the content of `manifest.json`, with its own checksum."""
        # Through JSON first, which turns keys into text: the digest must match what is read.
        document = parse_json(json.dumps({"format": FORMAT, **asdict(self)}))
        return json.dumps({"sha256": _digest(document), **document}, indent=1)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint; raises a `CheckpointError` with what is wrong with it."""
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
                f"it is of format {short(str(number))}, and this samestep reads {FORMAT}: use the version that wrote it"
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
    """Return the fields of a manifest; raises if one is not of its kind: a checksum keeps no author out."""
    _check_fields("", document, _KINDS, _ADDED_LATER)
    best, files = document["best"], document.get("files", {})
    if not document["saved_at"] < _LAST_TIME:
        raise CheckpointError(f"{MANIFEST} is damaged: it has saved_at: {document['saved_at']}")
    if best is not None:
        _check_fields("best.", best, _BEST)
    for name, entry in files.items():
        sound = isinstance(entry, list) and [type(part) for part in entry] == [str, int]
        if not sound or PurePath(name).name != name:
            raise CheckpointError(f"{MANIFEST} is damaged: files has {short(repr(name))}: {entry!r:.80}")
    _check_fields("versions.", document["versions"], dict.fromkeys(document["versions"], _TEXT))
    threads = document["plan"].get("threads_per_rank", 1)
    _check_fields("plan.", {"threads_per_rank": threads}, {"threads_per_rank": _COUNT})
    found = {name: (digest, size) for name, (digest, size) in files.items()}
    return {**document, "best": None if best is None else Best(**best), "files": found}


def _check_fields(
    prefix: str, found: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]], optional: Sequence[str] = ()
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
    """Return the name of a step's directory: `step-00000120`."""
    return f"step-{step:08d}"


def verify_checkpoint(folder: Path, *, checksums: bool = True) -> Manifest:
    """Check that a checkpoint is complete and unchanged.

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
                raise CheckpointError(f"{name} has {found.st_size} bytes and was written with {size}")
            if checksums and sha256_of(path) != digest:
                raise CheckpointError(f"{name} is not what was written (checksum)")
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from None
    return manifest
