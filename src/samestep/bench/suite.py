"""All measurements, one after the other, each a command of its own. No torch here."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.environment.interpreter import interpreter_words
from samestep.errors import PlanError

_LAST_LINES = 5
"""Of what a part that failed printed."""


@dataclass(frozen=True)
class Part:
    """One measurement of the suite."""

    name: str
    """The command's, after `samestep bench`, and that of its file."""
    least_world: int = 1
    """The fewest ranks that it can measure."""
    directory: bool = False
    """True if it takes the disk to measure."""


PARTS = (
    Part("comm", least_world=2),
    Part("scaling"),
    Part("memory"),
    Part("loader"),
    Part("checkpoint", directory=True),
)
"""In the order in which they run."""


@dataclass(frozen=True)
class Outcome:
    """The result of one part of the suite."""

    name: str
    seconds: float
    failed: str = ""
    """The end of what it printed, if it failed."""


def words_of(
    part: Part, config: Path | None, overrides: Sequence[str], worlds: Sequence[int], quick: bool, folder: Path
) -> list[str]:
    """Return a part's command line, after `samestep`."""
    words = ["bench", part.name]
    if config is not None:
        words += [str(config), *overrides]
    ranks = [world for world in worlds if world >= part.least_world]
    words += ["--worlds", ",".join(map(str, ranks))]
    words += ["--quick"] if quick else []
    words += ["--directory", str(folder)] if part.directory else ()
    return [*words, "--output", str(folder / f"{part.name}.json")]


def run_suite(
    parts: Sequence[Part], words: Callable[[Part], list[str]], report: Callable[[str], None]
) -> list[Outcome]:
    """Run all parts; one that fails does not keep the others from running."""
    found = []
    for number, part in enumerate(parts, 1):
        report(f"{number}/{len(parts)} samestep bench {part.name}")
        outcome = _run(part.name, words(part))
        found.append(outcome)
        state = "failed" if outcome.failed else "done"
        report(f"{number}/{len(parts)} {part.name} {state} after {outcome.seconds:.0f} s")
    return found


def _run(name: str, words: Sequence[str]) -> Outcome:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *interpreter_words(), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()][-_LAST_LINES:]
    why = "" if done.returncode == 0 else "\n".join(lines) or f"exit code {done.returncode}"
    return Outcome(name, time.monotonic() - began, why)


def chosen_parts(names: Sequence[str], worlds: Sequence[int]) -> list[Part]:
    """Return the parts of these names, or all; without those that need more ranks than there are.

    Raises:
        PlanError: if a name is none.
    """
    known = {part.name: part for part in PARTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise PlanError(f"--only has {', '.join(unknown)}: there are {', '.join(known)}")
    wanted = [known[name] for name in names] or list(PARTS)
    return [part for part in wanted if max(worlds) >= part.least_world]
