"""The manifest of a checkpoint, and the check that its files are those that were written.

No torch here: checkpoints are listed in a moment, and on machines that only launch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

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


def _in_the_folder(name: str) -> str:
    if PurePath(name).name != name:
        raise ValueError("leads elsewhere")
    return name


def _with_threads(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    threads = plan.get("threads_per_rank", 1)
    if type(threads) is not int or threads < 0:
        raise ValueError("threads_per_rank is no count")
    return plan


Count = Annotated[int, Field(strict=True, ge=0, lt=10**13)]
Time = Annotated[float, Field(strict=True, ge=0, lt=250_000_000_000, allow_inf_nan=False)]
"""Seconds since 1970 that a calendar can show."""
FileName = Annotated[str, AfterValidator(_in_the_folder)]


@dataclass(frozen=True)
class Best:
    """The step with the best evaluation so far."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: Count
    metric: str
    value: Annotated[float, Field(strict=True)]


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, and how it came about."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    step: Count
    """Completed steps."""
    epoch: Count
    """Completed epochs."""
    world: Count
    """Ranks of the run when this was written; any other number can resume from it."""
    saved_at: Time
    metrics: Mapping[str, Any]
    """The last evaluation's values."""
    best: Best | None
    ended: str | None
    """Why the run ended with this step; None if it did not."""
    config: Mapping[str, Any]
    plan: Annotated[Mapping[str, Any], AfterValidator(_with_threads)]
    versions: Mapping[str, str]
    files: Mapping[FileName, tuple[str, Count]] = field(default_factory=dict)
    """Checksum and size of each file."""
    measured: Count | None = None
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
        try:
            return _TYPED.validate_python(document)
        except ValidationError as error:  # a checksum keeps no author out
            wrong = error.errors()[0]
            name = short(".".join(map(str, wrong["loc"])))
            shown = f"no {name}" if wrong["type"] == "missing" else f"{name}: {short(repr(wrong['input']), 80)}"
            raise CheckpointError(f"{MANIFEST} is damaged: it has {shown}") from None


_TYPED = TypeAdapter(Manifest)


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
