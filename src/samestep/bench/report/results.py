"""Reads results from files and folders, and joins those of one machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.bench.document import FORMAT, Document
from samestep.bench.report.fields import Row, check_rows, identity
from samestep.bench.scaling_figures import with_efficiency
from samestep.errors import PlanError, TextError
from samestep.parsing.json_text import read_json

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
    """By the facts in which they differ; by their files if in none."""
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
