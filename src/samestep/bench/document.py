"""The file that a measurement writes: versioned, with the machine that it was made on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.errors import PlanError, TextError
from samestep.parsing.json_text import read_json
from samestep.version import __version__

FORMAT = "samestep bench"
VERSION = 1


@dataclass(frozen=True)
class Document:
    """One measurement."""

    kind: str
    """What was measured: the subcommand's name."""
    machine: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return it as it is written."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "machine": dict(self.machine),
            "rows": [dict(row) for row in self.rows],
        }

    def write(self, path: Path) -> None:
        """Write it; the directory must exist."""
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Document:
        """Read a file.

        Raises:
            TextError: if it holds something else, or another version of it.
        """
        try:
            found = read_json(path)
        except TextError as error:
            raise TextError(f"{path} {error}") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise TextError(f"{path} holds no result of samestep bench")
        if found.get("version") != VERSION:
            raise TextError(
                f"{path} has version {found.get('version')} of these results, and this samestep reads "
                f"{VERSION}: measure again"
            )
        kind, machine, rows = (found.get(name) for name in ("kind", "machine", "rows"))
        if not (isinstance(kind, str) and isinstance(machine, dict) and isinstance(rows, list)):
            raise TextError(f"{path} is incomplete: kind, machine or rows are missing")
        if not isinstance(machine.get("hosts", []), list):
            raise TextError(f"{path} is incomplete: machine has no list of hosts")
        return cls(kind, machine, rows)


def machine_facts(device: str, hosts: Sequence[str]) -> dict[str, Any]:
    """Return what a figure depends on besides the code."""
    import torch

    return {
        "device": device,
        "hosts": sorted(set(hosts)),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "samestep": __version__,
    }


def refuse_other_result(path: Path) -> None:
    """Refuse to replace a file that is no result of ours.

    Raises:
        PlanError: There is one, or no directory for it.
    """
    if not path.parent.is_dir():
        raise PlanError(f"{path}: there is no directory {path.parent}")
    if not path.exists():
        return
    try:
        Document.read(path)
    except TextError:
        raise PlanError(f"{path} exists and is no result of samestep bench: give another name, or remove it") from None
