"""Reads results from files and folders, and joins those of one machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)  # fmt: skip

from samestep.bench.document import FORMAT, Document
from samestep.bench.scaling_report import with_efficiency
from samestep.errors import PlanError, TextError
from samestep.parsing.json_text import read_json
from samestep.parsing.limits import short

Row = Mapping[str, Any]

_IDENTITY = (
    "mode", "workload", "variant", "precision", "world", "backend", "lanes", "global_batch", "operation", "bytes",
    "part", "lanes_per_rank",
)  # fmt: skip
"""Fields that say what was measured; the others say what came out."""


def identity(kind: str, row: Row) -> tuple[object, ...]:
    """Return what a row measured: equal for two measurements of the same."""
    leak = row.get("leak") or {}
    whose = ("leak" in row, leak.get("rank"), leak.get("memory"))
    return (kind, *whose, *(row.get(name) for name in _IDENTITY))


class _Row(BaseModel):
    """Fields of every row; others are kept as they are."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    world: PositiveInt
    seconds: Annotated[list[PositiveFloat], Field(min_length=1)] | None = None


class _Timed(_Row):
    median: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat


class _Range(BaseModel):
    """A ratio with its range."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    median: float
    low: float
    high: float


class _Scaling(_Timed):
    mode: Literal["weak", "strong"]
    workload: str
    variant: str
    precision: str
    backend: str
    global_batch: NonNegativeInt
    efficiency: _Range | None = None
    ratio_to_ddp: _Range | None = None
    phases: dict[str, _Range] | None = None


class _Memory(_Row):
    """Sizes are None where a part cannot be told from the others."""

    part: str
    measured_bytes: float | None = None
    low: float | None = None
    high: float | None = None


class _Comm(_Timed):
    operation: str
    bytes: NonNegativeInt
    bus_bytes: float


class _Growth(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    leaks: bool
    rank: int
    host: str
    slope_bytes_per_step: float
    low: float
    high: float
    steps: float


class _Leak(_Row):
    leak: _Growth


_KINDS: Mapping[str, type[_Row]] = {"scaling": _Scaling, "memory": _Memory, "comm": _Comm}


def check_rows(file: Path, kind: str, rows: object) -> None:
    """Refuse rows that a report could not be made of.

    Raises:
        TextError: with the first field that is missing, or holds something else.
    """
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        if not isinstance(row, dict):
            raise TextError(f"{file}: row {number} of kind {short(repr(kind))} holds no fields")
        model = _Leak if "leak" in row else _KINDS.get(kind, _Row)
        try:
            model.model_validate(row)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            raise TextError(
                f"{file}: row {number} of kind {short(repr(kind))} has {name} {short(repr(row.get(name)))}, which a "
                "report cannot be made of"
            ) from None


KINDS = ("scaling", "comm", "memory")
"""In the order of a report; others come after them."""
_MACHINE = ("device", "cpus", "system", "python", "torch", "samestep")
"""Facts that make figures comparable. Not the hosts: a curve over nodes has other ones at each point."""


@dataclass(frozen=True)
class Result:
    """A document, and where it was read."""

    file: Path
    document: Document

    @property
    def config(self) -> str:
        """Return which config was measured; its hash, or the name of a built-in one."""
        return str(self.document.machine.get("config") or "")

    @property
    def key(self) -> tuple[str, ...]:
        """Return the key of its machine."""
        return tuple(str(self.document.machine.get(name)) for name in _MACHINE)

    def identities(self) -> Iterator[tuple[object, ...]]:
        """Yield what its rows measured."""
        for row in self.document.rows:
            yield (self.config, *identity(self.document.kind, row))


@dataclass(frozen=True)
class Machine:
    """Everything that was measured on one machine, or on one cluster."""

    label: str
    """Its distinguishing label; empty if there is one only."""
    results: Sequence[Result]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return what it is; hosts of all its results."""
        hosts = {h for r in self.results for h in r.document.machine.get("hosts", ())}
        return {**self.results[0].document.machine, "hosts": sorted(map(str, hosts))}

    @property
    def device(self) -> str:
        """Return what its ranks compute on: `cpu` or `cuda`."""
        return str(self.facts.get("device", "")).partition(":")[0]

    def kinds(self) -> list[str]:
        """Kinds that were measured, in the order of a report."""
        found = {result.document.kind for result in self.results}
        return sorted(found, key=lambda kind: (KINDS.index(kind) if kind in KINDS else 99, kind))

    def rows(self, kind: str) -> list[Row]:
        """Return all rows of a kind; efficiencies are against the smallest world of all of them."""
        by_config: dict[str, list[Row]] = {}
        for result in self.results:
            if result.document.kind == kind:
                by_config.setdefault(result.config, []).extend(result.document.rows)
        return [row for rows in by_config.values() for row in (with_efficiency(rows) if kind == "scaling" else rows)]

    def joined(self, kind: str) -> Document:
        """Return all of a kind as if it had been measured at once."""
        return Document(kind, self.facts, self.rows(kind))


def read_results(paths: Sequence[Path]) -> list[Result]:
    """Return every result that these files and folders hold; of a folder, those right in it.

    Raises:
        TextError: a file holds none, or one that cannot be used.
        PlanError: there is no such path, or no result in a folder.
    """
    found: dict[Path, Result] = {}
    for path in paths:
        if path.is_dir():
            inside = [file for file in sorted(path.glob("*.json")) if _is_result(file)]
            if not inside:
                raise PlanError(f"{path} is a folder without results of samestep bench (*.json)")
        elif path.is_file():
            inside = [path]
        else:
            raise PlanError(f"{path}: there is no such file or folder")
        for file in inside:
            found.setdefault(file.resolve(), _read(file))
    return list(found.values())


def _is_result(file: Path) -> bool:
    """Return whether a file is a result: a folder may hold other JSON. A broken one of ours is an error."""
    try:
        found = read_json(file)
    except TextError as error:
        raise TextError(f"{file} {error}") from None
    return isinstance(found, dict) and found.get("format") == FORMAT


def _read(file: Path) -> Result:
    document = Document.read(file)
    check_rows(file, document.kind, document.rows)
    if not document.rows:
        raise TextError(f"{file} holds no rows: nothing was measured")
    return Result(file, document)


def machines_of(results: Sequence[Result]) -> list[Machine]:
    """Results joined by machine; what was measured twice on equal machines stays apart."""
    groups: list[list[Result]] = []
    for result in results:
        fitting = (g for g in groups if g[0].key == result.key and not _overlap(g, result))
        group = next(fitting, None)
        if group is None:
            groups.append([result])
        else:
            group.append(result)
    machines = [Machine("", group) for group in groups]
    if len(machines) == 1:
        return machines
    return [replace(m, label=text) for m, text in zip(machines, _labels(machines), strict=True)]


def _overlap(group: Sequence[Result], result: Result) -> bool:
    known = {one for other in group for one in other.identities()}
    return any(one in known for one in result.identities())


def _labels(machines: Sequence[Machine]) -> list[str]:
    """Label by the facts in which they differ; by their files if in none."""
    names = ("hosts", *_MACHINE)
    facts = [{name: _text(machine.facts.get(name)) for name in names} for machine in machines]
    differing = [name for name in names if len({one[name] for one in facts}) > 1]
    labels = [", ".join(_said(name, one[name]) for name in differing) for one in facts]
    if len(set(labels)) == len(labels):
        return labels
    files = ["+".join(result.file.stem for result in machine.results) for machine in machines]
    if len(set(files)) < len(files):
        files = ["+".join(str(result.file) for result in machine.results) for machine in machines]
    return files


def _said(name: str, value: str) -> str:
    if name in ("hosts", "device", "system"):
        return value
    return f"{value} cpus" if name == "cpus" else f"{name} {value}"


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
