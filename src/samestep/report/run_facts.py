"""The facts of a run, from its directory: for pages that are evidence of it. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.config import Config
from samestep.errors import TextError
from samestep.parsing.files import read_bytes
from samestep.parsing.json_text import read_object

_PLAN = {
    "device": "device",
    "world": "ranks",
    "threads_per_rank": "threads per rank",
    "precision": "precision",
    "same": "same",
    "global_batch": "global batch",
    "lanes": "lanes",
    "deterministic": "deterministic",
}
"""What a page says of a run's plan.json."""


def run_facts(run: Path) -> dict[str, str]:
    """Versions, device, threads and the config's hash, by name; what cannot be read is left out."""
    facts = {"config": _digest(config)} if (config := _content(run / "config.json")) else {}
    plan = read_object(run / "plan.json")
    facts |= {title: str(plan[key]) for key, title in _PLAN.items() if key in plan}
    versions = _newest_manifest(run).get("versions")
    if isinstance(versions, Mapping):
        facts["trained with"] = ", ".join(f"{name} {number}" for name, number in versions.items())
    return facts


def config_differences(runs: Sequence[Path]) -> list[tuple[str, ...]]:
    """Return the keys of runs' configs that are not the same in all, each with the value of every run.

    Args:
        runs: Their directories. Of one whose config cannot be read, all values are empty, and no difference.
    """
    flat = [flat_config(run) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, *(one.get(key, "") for one in flat)) for key in keys]
    return [row for row in rows if len({value for value, one in zip(row[1:], flat, strict=True) if one}) > 1]


def flat_config(run: Path) -> dict[str, str]:
    """Return the values of a run's config as JSON, by their dotted keys; empty if it cannot be read."""
    document = read_object(run / "config.json")
    return dict(_flat(document)) if document else {}


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}".lstrip("."))
    else:
        yield key, json.dumps(value)


def config_fact(config: Config) -> dict[str, str]:
    """Return the hash of a config as it was loaded, for pages about no run's directory."""
    return {"config": _digest(config.model_dump_json(indent=2).encode())}


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except TextError:
        return b""


def _digest(content: bytes) -> str:
    return f"sha256 {hashlib.sha256(content).hexdigest()}"


def _newest_manifest(run: Path) -> Mapping[str, Any]:
    return read_object(max((run / "checkpoints").glob("step-*/manifest.json"), default=run / "none"))
