"""The facts of a run, from its directory: for pages that are evidence of it. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.config import Config
from samestep.errors import TextError
from samestep.parsing.files import read_bytes
from samestep.parsing.json_text import read_json

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
    """Versions, device, threads and the config's hash, by name; what cannot be read is left out.

    Args:
        run: a run's directory.
    """
    facts = {"config": _digest(config)} if (config := _content(run / "config.json")) else {}
    plan = _document(run / "plan.json")
    facts |= {title: str(plan[key]) for key, title in _PLAN.items() if key in plan}
    versions = _newest_manifest(run).get("versions")
    if isinstance(versions, Mapping):
        facts["trained with"] = ", ".join(f"{name} {number}" for name, number in versions.items())
    return facts


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
    return _document(max((run / "checkpoints").glob("step-*/manifest.json"), default=run / "none"))


def _document(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file; empty if there is none, as before a run's first checkpoint."""
    try:
        value = read_json(path)
    except TextError:
        return {}
    return value if isinstance(value, dict) else {}
