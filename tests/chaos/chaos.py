"""Hits a run again and again, at random instants and sizes, and resumes it each time.

    python -m tests.chaos.chaos --kills 300 --seed 1

Every run must end with the untouched run's weights and losses. After every fault nothing of the
run may be left, neither a process nor a socket that listens, and nothing half-written may be taken
for a checkpoint. A fault that must end the run does so with its exit code and a clear message.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from samestep.checkpoint.listing import list_checkpoints
from samestep.train.record import RunRecord
from tests.chaos.disk import SmallDisk
from tests.chaos.family import adopting_orphans, nothing_left
from tests.chaos.faults import KINDS, SECONDS_TO_END, STEPS, Scene, remove
from tests.cli.processes import command, popen
from tests.distributed.running import losses_of

_FAULTS_PER_RUN = 12
_SECONDS_TO_VANISH = 20.0
"""For processes that nobody waits for, such as loader workers, when their run has ended."""


@dataclass
class Chaos:
    """One history of faults."""

    folder: Path
    kills: int
    seed: int
    kinds: Sequence[str] = tuple(KINDS)
    tell: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    """The faults that hit a run, by kind."""
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """How long each took, from the run's start to the end of its last process."""
    saved: Counter[str] = field(default_factory=Counter)
    """What survivors of lost ranks reported about the state that they held."""
    runs: int = 0
    shard: str = "none"

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def hits(self) -> int:
        return sum(self.counts.values())

    def play(self) -> None:
        """Hit runs until there were enough faults; the last run ends, too. Raises what went wrong."""
        self._disk = SmallDisk(self.folder / "disk")
        try:
            with adopting_orphans():
                self._start_servers()
                self._untouched = self._whole_run(self._scene("untouched", 1))
                while self.hits < self.kills:
                    self._one_run(f"run-{self.runs}")
                    self.runs += 1
                    assert self.runs < 20 + 5 * self.hits, "the faults hit nothing"
        finally:
            self._disk.close()

    def _start_servers(self) -> None:
        """What forks commands for us stays, and is no part of a run."""
        popen(command("--version"), stdout=-3, stderr=-3).wait()

    def _scene(self, name: str, every_steps: int) -> Scene:
        world = self._random.randint(1, 4)
        folder = self._disk.folder / name
        return Scene(folder, world, self._disk, self._random, every_steps, self.shard)

    def _whole_run(self, scene: Scene) -> tuple[str, list[float]]:
        """Let a run end; its last state and all its losses."""
        answers = scene.ranks(timeout=600).answers()
        assert all(ok for ok, _ in answers), answers
        return RunRecord.read(scene.run / "record").state_hash, losses_of(scene.run)

    def _one_run(self, name: str) -> None:
        """Hit a run a dozen times at most, then let it end, and compare."""
        history: list[str] = []
        # Where saves are rare, what survivors save matters.
        every_steps = self._random.choice([2, 2, 10])
        for _ in range(_FAULTS_PER_RUN):
            scene = self._scene(name, every_steps)
            if self.hits >= self.kills or self._is_complete(scene):
                break
            # One of each kind before the second of any: a short history has all of them.
            kinds = [kind for kind in self.kinds if not self.counts[kind]] or self.kinds
            weights = [KINDS[kind][0] for kind in kinds]
            history.append(self._hit(scene, self._random.choices(kinds, weights)[0]))
        scene = self._scene(name, every_steps)
        ended = self._whole_run(scene)
        if ended != self._untouched:
            pairs = zip(ended[1], self._untouched[1], strict=False)
            first = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
            raise AssertionError(
                f"{name} did not end as the untouched run: losses from step {first} on, after {history}"
            )
        self._check(scene, "the end")
        remove(scene.run)

    def _hit(self, scene: Scene, kind: str) -> str:
        started = time.monotonic()
        what = f"{kind} on {scene.world} ranks, seed {self.seed}, fault {self.hits + 1}"
        try:
            with nothing_left(what, _SECONDS_TO_VANISH):
                happened = KINDS[kind][1](scene)
            self._check(scene, kind)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
        self.counts[kind] += happened
        if happened:
            self.seconds[kind].append(time.monotonic() - started)
        steps = [item.step for item in list_checkpoints(self._checkpoints(scene), checksums=False)]
        if happened:
            self._count_survivors(scene.run)
            self.tell(f"{self.hits}/{self.kills}  {kind} on {scene.world} ranks: saved {steps}")
        return f"{kind} on {scene.world}: {steps}"

    def _count_survivors(self, run: Path) -> None:
        said: set[str] = set()
        for path in (run / "logs").glob("rank-*.log"):
            for line in reversed(path.read_text(errors="replace").splitlines()):
                if "Lost a rank. " in line:
                    reason = line.partition("Lost a rank. ")[2]
                    said.add(re.sub(r" \d+", " N", reason))
                if "Lost a rank. " in line or "Plan: " in line:
                    break  # what is before it is of an earlier start
        self.saved.update(said)

    def _is_complete(self, scene: Scene) -> bool:
        """Whether the run was faster than the last fault."""
        found = list_checkpoints(self._checkpoints(scene), checksums=False)
        return any(item.step == STEPS for item in found)

    def _checkpoints(self, scene: Scene) -> Path:
        return scene.run / "checkpoints"

    def _check(self, scene: Scene, what: str) -> None:
        found = list_checkpoints(self._checkpoints(scene), checksums=True)
        wrong = [f"{item.folder}: {item.wrong}" for item in found if item.wrong]
        assert not wrong, f"{what} on {scene.world} ranks left {wrong}"

    def summary(self, minutes: float) -> dict[str, Any]:
        """Everything that was counted, for a report."""
        return {
            "kills": self.hits,
            "runs": self.runs,
            "seed": self.seed,
            "minutes": round(minutes, 1),
            "disk": "tmpfs" if self._disk.is_mounted else "limited size of files",
            "kinds": {
                kind: {
                    "count": self.counts[kind],
                    "median_seconds": round(median(self.seconds[kind]), 1),
                    "longest_seconds": round(max(self.seconds[kind]), 1),
                }
                for kind in self.kinds
                if self.counts[kind]
            },
            "survivors": dict(self.saved.most_common()),
        }


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table("fault", "times", "median s", "longest s")
    for kind, row in found["kinds"].items():
        table.add_row(kind, *map(str, row.values()))
    console.print(table)
    for said, times in found["survivors"].items():
        console.print(f"survivors, {times} times: {said}")
    console.print(
        f"{found['kills']} faults, seed {found['seed']}: every one of {found['runs']} runs ended with the "
        f"untouched run's bits, and nothing was left behind; {found['minutes']} minutes"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shard", choices=("none", "optimizer", "weights"), default="none")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    console = Console(stderr=arguments.json, highlight=False)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(
            Path(folder), arguments.kills, arguments.seed, arguments.kinds,
            lambda line: console.print(f"{(time.monotonic() - started) / 60:5.1f} min  {line}"),
            shard=arguments.shard,
        )  # fmt: skip
        chaos.play()
        found = chaos.summary((time.monotonic() - started) / 60)
    _show(found, console)
    if arguments.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    assert SECONDS_TO_END > _SECONDS_TO_VANISH
    sys.exit(main())
