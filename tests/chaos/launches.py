"""Launches one after another, then several at once: each must succeed, and leave nothing behind.

python -m tests.chaos.launches --in-a-row 50 --at-once 4
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from tests.chaos.family import adopting_orphans, nothing_left
from tests.cli.processes import command, popen
from tests.distributed.running import losses_of, settings

_STEPS = 4
_SECONDS = 300.0
_SECONDS_TO_VANISH = 20.0


@dataclass
class Launches:
    """Launches of one small run, which are all the same."""

    folder: Path
    cold: str = "a launch that starts from nothing, as a person's does"
    """Why its processes are not forked; empty if they may be."""
    tell: Callable[[str], None] = print
    world: int = 2
    seconds: list[float] = field(default_factory=list)
    """How long each took."""

    def play(self, in_a_row: int, at_once: int, rounds: int = 3) -> None:
        """Raises what went wrong."""
        with adopting_orphans():
            popen(command("--version"), stdout=-3, stderr=-3).wait()  # starts what forks commands
            self._expected: list[float] | None = None
            for number in range(in_a_row):
                self._launch(f"launch {number + 1} of {in_a_row}", 1)
            for number in range(rounds if at_once else 0):
                self._launch(f"{at_once} at once, {number + 1} of {rounds}", at_once)

    def _launch(self, what: str, together: int) -> None:
        started = time.monotonic()
        with nothing_left(what, _SECONDS_TO_VANISH), ExitStack() as stack:
            processes = []
            for number in range(together):
                run = self.folder / f"{len(self.seconds)}-{number}"
                file, output = run.with_suffix(".yaml"), run.with_suffix(".out")
                distributed = {"device": "cpu", "timeout": 120}
                config = settings("Slow", run, steps=_STEPS, epochs=None, distributed=distributed)
                file.write_text(yaml.safe_dump({**config, "params": {"seconds": 0.0}}))
                argv = command("launch", file, "--nproc", str(self.world))
                stream = stack.enter_context(output.open("w"))
                process = popen(argv, stdout=stream, stderr=stream, cold=self.cold)
                stack.callback(process.kill)
                processes.append((process, run, output))
            for process, run, output in processes:
                code = process.wait(_SECONDS)
                assert code == 0, f"{what} ended with exit code {code}:\n{output.read_text()}"
                found = losses_of(run)
                self._expected = self._expected or found
                assert len(found) == _STEPS, f"{what}: {found}"
                assert found == self._expected, f"{what}: {found}"
        self.seconds += [time.monotonic() - started] * together
        self.tell(f"{what}: {self.seconds[-1]:.1f} s")

    def summary(self) -> dict[str, Any]:
        return {
            "launches": len(self.seconds),
            "ranks": self.world,
            "cold": bool(self.cold),
            "median_seconds": round(median(self.seconds), 1),
            "longest_seconds": round(max(self.seconds), 1),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-a-row", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--forked", action="store_true", help="fork processes that have torch")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    to = sys.stderr if arguments.json else sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        launches = Launches(Path(folder), tell=lambda line: print(line, file=to, flush=True))
        launches.cold = "" if arguments.forked else launches.cold
        launches.play(arguments.in_a_row, arguments.at_once)
    found = launches.summary()
    print(f"{found['launches']} launches, none failed and none left anything behind", file=to)
    if arguments.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
