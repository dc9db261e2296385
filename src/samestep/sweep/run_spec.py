"""One run among many: a config with overrides, in a directory of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.checkpoint.run_result import RunResult, read_result
from samestep.launch.commands.rank_command import argv_for
from samestep.sweep.children import Child, Children


def override(key: str, value: Any) -> str:
    """Return a value as the command line takes it; the same to the bit when it is read."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


@dataclass(frozen=True)
class RunSpec:
    """A run to train, and its directory."""

    name: str
    """What messages call it."""
    config: Path
    overrides: tuple[str, ...]
    folder: Path
    """The run's directory."""
    ranks: int = 1
    prune_dir: Path | None = None
    """Where the run asks after each evaluation whether to continue."""
    variables: Mapping[str, str] = field(default_factory=dict)
    launch: tuple[str, ...] = ()
    """Options of `samestep launch` by which its ranks are started elsewhere; here if there are none."""
    hang_timeout: float | None = None
    """Seconds in which something must move in a run on one rank; several ranks watch each other."""
    start_timeout: float | None = None
    """Seconds in which such a run must come to its first step, if `hang_timeout` is set."""

    def result(self) -> RunResult | None:
        """Return what the run has come to, if it has begun."""
        return read_result(self.folder)

    def words(self) -> tuple[str, ...]:
        """Return the command that trains it: in one process, or on ranks of this machine."""
        overrides = (*self.overrides, override("run_dir", str(self.folder)))
        options = [] if self.prune_dir is None else ["--prune-dir", str(self.prune_dir)]
        if self.launch:
            return ("launch", *argv_for(self.config, overrides, [*options, *self.launch], ()))
        if self.ranks == 1:
            if self.hang_timeout is not None:
                options += ["--hang-timeout", f"{self.hang_timeout:g}"]
                if self.start_timeout is not None:
                    options += ["--start-timeout", f"{self.start_timeout:g}"]
            return ("train", *argv_for(self.config, overrides, options, ()))
        options += ["--nproc", str(self.ranks), "--via", "torchrun"]
        return ("launch", *argv_for(self.config, overrides, options, ()))

    def start(self, children: Children, logs: Path) -> Child:
        """Start the run, or resume it from its newest checkpoint."""
        output = logs / f"{self.name.replace(' ', '-')}.txt"
        return children.start(self.name, self.words(), output, self.variables)


def why_failed(spec: RunSpec, child: Child) -> str:
    """Return why a run has not come to its end."""
    result = spec.result()
    if result is not None and result.status == "failed" and result.reason:
        return result.reason
    return child.ending()
