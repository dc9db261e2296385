"""Reports where every rank is, from the heartbeats and from ranks' own answers: which one the others wait for, and why.

The cause of a run's end is left in the store by the first rank that knows it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from samestep.distributed.health.activity import EXCHANGE, READING, Activity
from samestep.distributed.health.peer_errors import unmatched_calls
from samestep.errors import SamestepError
from samestep.tracebacks import format_error

ProcessState = Literal["", "gone", "stopped", "running"]

_SILENT: dict[ProcessState, str] = {
    "": "has ended, is stopped, or holds the interpreter",
    "gone": "has ended",
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "running": "runs but is silent: it holds the interpreter (its log then has its stacks), or is ending",
}


def process_state(pid: int) -> ProcessState:
    """Return what a process of this machine does, by the kernel's account; empty where that is not known."""
    folder = Path("/proc")
    if not (folder / "self" / "stat").exists():
        return ""
    try:
        # The name, in parentheses, may hold anything.
        letter = (folder / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "running")  # type: ignore[return-value]


@dataclass(frozen=True)
class Beat:
    """One rank's last sign of life."""

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    seconds: float
    """How long it has been in that phase."""
    collective: str
    """The last collective it called."""
    sequence: int
    time: float
    """When this was written, by that host's clock."""
    silent: bool = False
    """Whether no newer one came while we watched."""
    process: ProcessState = ""
    """What its process does, where a silent rank is on this machine."""

    @classmethod
    def of(cls, activity: Activity, rank: int, host: str, seconds: float = 0.0) -> Beat:
        """Return what this process does now."""
        name, number = activity.collective, activity.sequence
        return cls(rank, host, os.getpid(), activity.step, activity.phase, seconds, name, number, time.time())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def waits(self) -> bool:
        """Return whether it waits for other ranks, as far as the host knows.

        Where a backend works asynchronously, the host waits for it when it reads a result.
        """
        return self.phase in (EXCHANGE, READING)

    @property
    def is_awaited(self) -> bool:
        """Return whether the others wait for it, and not it for them."""
        return self.silent or not self.waits

    @property
    def age(self) -> float:
        """Seconds since this was written, as far as two clocks can be compared."""
        return max(0.0, time.time() - self.time)

    def where(self) -> str:
        """Return where this rank is, for people."""
        if self.silent:
            # What it does now is another thing: it cannot tell.
            last = f"its last sign of life, {self.age:.0f} s ago, was from {self._phase()} at step {self.step}"
            return f"{_SILENT[self.process]}; {last}"
        return f"is in {self._phase()} at step {self.step} for {self.seconds:.0f} s"

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid}) {self.where()}"

    def _phase(self) -> str:
        return f"{self.collective} #{self.sequence}" if self.waits else self.phase


Calls = Sequence[tuple[int, str]]


def different_calls(calls: Mapping[int, Calls]) -> str | None:
    """Return a message if some ranks called another collective than others under one number."""
    by_number: dict[int, dict[int, str]] = {}
    for rank, named in calls.items():
        for number, name in named:
            by_number.setdefault(number, {})[rank] = name
    for number in sorted(by_number):
        names = by_number[number]
        if len(set(names.values())) > 1:
            groups: dict[str, list[int]] = {}
            for rank, name in sorted(names.items()):
                groups.setdefault(name, []).append(rank)
            called = "; ".join(f"{_ranks(ranks)} called {name}" for name, ranks in groups.items())
            return f"the ranks called different collectives as #{number}: {called}"
    return None


def hang_report(beats: Sequence[Beat], stacks: Mapping[int, str], calls: Mapping[int, Calls], timeout: float) -> str:
    """Return who waits for whom, and what the ranks that do not wait are doing."""
    waiting = [beat for beat in beats if not beat.is_awaited]
    stuck = [beat for beat in beats if beat.is_awaited]
    lines = [f"a collective waited longer than distributed.timeout ({timeout:g} s)"]
    mismatch = different_calls(calls)
    if mismatch is not None:
        lines.append(mismatch)
    lines += [str(beat) for beat in stuck]
    key = lambda beat: (beat.collective, beat.sequence)  # noqa: E731
    for (name, number), group in groupby(sorted(waiting, key=key), key):
        together = list(group)
        longest = max(beat.seconds for beat in together)
        verb = "waits" if len(together) == 1 else "wait"
        ranks = _ranks([beat.rank for beat in together])
        lines.append(f"{ranks} {verb} in {name} #{number} for {longest:.0f} s")
    # If no rank is elsewhere, the ones that wait are all there is to look at.
    for beat in stuck or (waiting if mismatch else []):
        stack = stacks.get(beat.rank)
        if stack:
            lines.append(f"rank {beat.rank}'s Python stack (most recent call last):\n{stack}")
    return "\n".join(lines)


def _ranks(numbers: Sequence[int]) -> str:
    """rank 3; ranks 0-2; ranks 0-2, 5."""
    parts: list[str] = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        block = [number for _, number in run]
        parts.append(str(block[0]) if len(block) == 1 else f"{block[0]}-{block[-1]}")
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(parts)}"


Answers = Mapping[int, Mapping[str, Any]]
"""By rank."""


def calls_of(answers: Answers) -> dict[int, Calls]:
    """Return the last collectives of each rank."""
    return {rank: [tuple(call) for call in answer["calls"]] for rank, answer in answers.items()}


def stacks_of(answers: Answers) -> dict[int, str]:
    """Return the Python stack of each rank."""
    return {rank: answer["stack"] for rank, answer in answers.items()}


def unmatched(beats: Sequence[Beat], answers: Answers) -> str | None:
    """Return a message if ranks wait in a collective of the user's own that others do not call."""
    waiting = [beat.rank for beat in beats if not beat.is_awaited]
    stacks = stacks_of(answers)
    return unmatched_calls({b.rank: stacks.get(b.rank, "") for b in beats}, waiting)


def parted(answers: Answers) -> str | None:
    """Return a message, with all stacks, if ranks have called different collectives under one number."""
    found = different_calls(calls_of(answers))
    if found is None:
        return None
    advice = "Every rank must make the same calls: none of them behind `if run.is_main:`"
    stacks = [f"rank {rank}'s Python stack:\n{text}" for rank, text in stacks_of(answers).items()]
    return "\n".join([f"{found}. {advice}", *stacks])


_LONGEST_TRACE = 8000


def failure_of(rank: int, host: str, error: BaseException) -> str:
    """Return a rank that fails by itself."""
    kind, first_line = type(error).__name__, next(iter(str(error).splitlines()), "")
    # The last part of its traceback, for users who cannot see the other machine's terminal.
    ours = isinstance(error, SamestepError)
    trace = "" if ours else format_error(error)[-_LONGEST_TRACE:]
    message = f"{kind}: {first_line}"
    return json.dumps({"rank": rank, "host": host, "kind": kind, "message": message, "trace": trace})


def absence_of(gone: Beat) -> str:
    """Return a rank that is gone, and cannot tell."""
    message = f"gone: it {gone.where()}"
    return json.dumps({"rank": gone.rank, "host": gone.host, "kind": "gone", "message": message})


def failed_first(cause: Mapping[str, Any]) -> str:
    """Return a cause, for people."""
    rank, host, message = (cause.get(key) for key in ("rank", "host", "message"))
    headline = f"rank {rank} on {host} failed first: {message}"
    return "\n".join(filter(None, [headline, str(cause.get("trace", "")).rstrip()]))
