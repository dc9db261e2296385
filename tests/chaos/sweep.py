"""One sweep with one and with two ranks for each trial, and once more while its processes are killed.

    python -m tests.chaos.sweep                              # the digits: 12 trials of 3 folds
    python -m tests.chaos.sweep pruner=none pruner_args={}   # all 36 runs
    python -m tests.chaos.sweep SWEEP.yaml trials=12 folds.k=3

All three must come to the same study, to the bit: the same values of every trial and fold, and the same
best. The third one loses its coordinator, a rank, and all processes, at random instants, and is resumed; no
trial may be lost, and no run that was done may run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from samestep.checkpoint.run_result import read_result
from tests.chaos.family import adopting_orphans, members, nothing_left
from tests.cli.processes import command, popen

ROOT = Path(__file__).parents[2]
DIGITS: dict[str, Any] = {
    "base": str(ROOT / "recipes" / "digits" / "config.yaml"),
    "space": {"params.lr": {"loguniform": [1e-4, 3e-2]}, "params.width": {"choice": [4, 8]}, "epochs": {"int": [1, 3]}},
    "objective": {"metric": "accuracy", "mode": "max"},
    "sampler_args": {"n_startup_trials": 4},
    "pruner": "median",
    "pruner_args": {"n_startup_trials": 3},
    "trials": 12,
    "folds": {"k": 3},
}
FAULTS = ("the coordinator", "a rank", "all processes")
_SECONDS = 3600.0
_SECONDS_TO_SAVE = 120.0
_RETRIES = 3
"""A run that loses a rank is resumed: its trial must not fail of it."""

Study = list[dict[str, Any]]


@dataclass
class SweepChaos:
    """A sweep, and what was measured of it."""

    folder: Path
    sweep: Path
    overrides: Sequence[str]
    seed: int
    cores: int = 2
    """As many ranks train at once, at most."""
    faults: Sequence[str] = FAULTS
    tell: Callable[[str], None] = print
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each of the sweeps took."""
    hits: list[str] = field(default_factory=list)
    """What was killed, and when."""
    starts: int = 0
    """Of runs, in the sweep that was killed."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def play(self) -> dict[str, Any]:
        """Raises what went wrong."""
        with adopting_orphans():
            popen(command("--version"), stdout=-3, stderr=-3).wait()  # starts what forks commands
            one = self._whole("one", *self._size(1, self.cores))
            two = self._whole("two", *self._size(2, self.cores // 2))
            _same(two, one, "two ranks for each trial")
            killed = self._killed()
            _same(killed, one, f"killed ({'; '.join(self.hits)})")
        return self._summary(one)

    # -- sweeps that nobody touches, and one that is hit --------------------------------------

    def _command(self, name: str, *words: str) -> list[str]:
        given = [f"directory={self.folder / name}", "name=chaos", f"retries={_RETRIES}"]
        return command("sweep", "run", self.sweep, *self.overrides, *given, *words, "--json")

    def _whole(self, name: str, *words: str) -> Study:
        began = time.monotonic()
        with nothing_left(name, _SECONDS_TO_SAVE), self._output(name).open("w") as output:
            process = popen(self._command(name, *words), stdout=subprocess.PIPE, stderr=output, cwd=self.folder)
            text = process.communicate(timeout=_SECONDS)[0]
        said = self._output(name).read_text()
        assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{said[-2000:]}"
        self.seconds[name] = round(time.monotonic() - began, 1)
        self.tell(f"{name}: {self.seconds[name]:.0f} s")
        found: Study = json.loads(text)["trials"]
        return found

    def _killed(self) -> Study:
        began = time.monotonic()
        done: dict[Path, int] = {}
        for number, fault in enumerate(self.faults):
            # In order, so that each finds the sweep at work; the last share is left to finish.
            until = (number + self._random.uniform(0.3, 1.0)) / (len(self.faults) + 1)
            with nothing_left(f"killing {fault}", _SECONDS_TO_SAVE):
                self._hit(fault, until)
            done = self._check_done(done)
        found = self._whole("killed", *self._any_size())
        self._check_done(done)
        self.seconds["killed"] = round(time.monotonic() - began, 1)
        self.starts = sum(starts_of(run) for run in runs_of(self.folder / "killed"))
        return found

    def _size(self, ranks: int, parallel: int) -> tuple[str, str]:
        return f"ranks_per_trial={ranks}", f"parallel={parallel}"

    def _any_size(self) -> tuple[str, str]:
        return self._size(self._random.choice([1, 2]), self._random.choice([1, 2]) * self.cores // 2)

    def _hit(self, fault: str, until: float) -> None:
        """Run it until a share of its runs is done and a moment longer, and kill something."""
        before = members()
        size = self._any_size()
        with self._output("killed").open("a") as output:
            process = popen(self._command("killed", *size), stdout=output, stderr=output, cwd=self.folder)
        self._wait(lambda: self._share() >= until, process)
        time.sleep(self._random.uniform(0.0, 2.0))
        self._kill(fault, process, before)
        self.hits.append(f"{fault} at {self._share():.0%} with {' '.join(size)}")
        self.tell(f"killed {self.hits[-1]}")
        if fault == "a rank":
            # The sweep resumes the run by itself; then let it save and end.
            self._wait(self._resumed_a_run, process)
            process.send_signal(signal.SIGTERM)
        process.wait(_SECONDS_TO_SAVE)

    def _kill(self, fault: str, process: subprocess.Popen[str], before: Mapping[int, str]) -> None:
        """At an instant at which a run trains."""
        while True:
            self._wait(lambda: bool(ranks_among(members(), before)), process)
            family = {pid: text for pid, text in members().items() if pid not in before}
            ranks = ranks_among(family, before)
            if not ranks:
                continue
            victims = {
                "the coordinator": [process.pid],
                "a rank": self._random.sample(ranks, 1),
                "all processes": list(family),
            }[fault]
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if fault != "a rank" or self._happens(self._resumed_a_run, 20.0):
                return  # else it had trained already, and was about to end

    def _resumed_a_run(self) -> bool:
        return "failed and is resumed" in self._output("killed").read_text()

    def _happens(self, what: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not what() and time.monotonic() < deadline:
            time.sleep(0.05)
        return what()

    def _wait(self, what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not what():
            said = self._output("killed")
            assert process.poll() is None, f"it ended too early:\n{said.read_text()[-2000:]}"
            assert time.monotonic() < deadline, "it did not come that far"
            time.sleep(0.05)

    def _share(self) -> float:
        """The share of its runs that are done."""
        total = len(runs_of(self.folder / "one"))
        return len(done_runs(self.folder / "killed")) / total

    def _check_done(self, before: dict[Path, int]) -> dict[Path, int]:
        """Runs that were done must not have been started again."""
        now = {run: starts_of(run) for run in done_runs(self.folder / "killed")}
        again = [str(run) for run, starts in before.items() if now.get(run) != starts]
        assert not again, f"runs that were done were started again: {again}"
        return now

    def _output(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def _summary(self, study: Study) -> dict[str, Any]:
        done = [trial for trial in study if trial["state"] == "complete"]
        return {
            "seed": self.seed,
            "trials": len(study),
            "states": {s: sum(t["state"] == s for t in study) for s in ("complete", "pruned", "failed")},
            "runs": len(runs_of(self.folder / "one")),
            "values": sorted({trial["value"] for trial in done}),
            "seconds": self.seconds,
            "killed": self.hits,
            "starts_of_killed": self.starts,
        }


def _same(found: Study, expected: Study, what: str) -> None:
    """The same study to the bit: JSON has every float's shortest exact form."""
    for one, other in zip(found, expected, strict=True):
        assert one == other, f"{what}: trial {one['number']} is\n{one}\nand was\n{other}"
    states = [trial["state"] for trial in expected]
    assert "complete" in states, f"no trial is complete: {states}"
    assert "failed" not in states, f"trials failed: {expected}"


def runs_of(sweep: Path) -> list[Path]:
    """The directories of a sweep's runs."""
    return sorted(path.parent for path in (sweep / "trials").rglob("result.json"))


def done_runs(sweep: Path) -> list[Path]:
    results = {run: read_result(run) for run in runs_of(sweep)}
    return [run for run, result in results.items() if result is not None and result.is_done]


def starts_of(run: Path) -> int:
    """How often a run was started and came to its plan."""
    log = run / "logs" / "rank-0.log"
    return log.read_text(errors="replace").count("Plan: ") if log.exists() else 0


def ranks_among(now: Mapping[int, str], before: Mapping[int, str]) -> list[int]:
    """The processes that train."""
    return [pid for pid, text in now.items() if pid not in before and re.search(r"samestep train", text)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="a sweep's file, the digits' if not given, and values, as key=value")
    parser.add_argument("--cores", type=int, default=2, help="to train on; 2")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [Path(word) for word in arguments.words if "=" not in word]
        overrides = [word for word in arguments.words if "=" in word]
        sweep = files[0] if files else folder / "digits.yaml"
        if not files:
            sweep.write_text(yaml.safe_dump(DIGITS))
        began = time.monotonic()

        def tell(line: str) -> None:
            print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr, flush=True)

        chaos = SweepChaos(folder, sweep.resolve(), overrides, arguments.seed, arguments.cores, tell=tell)
        found = chaos.play()
    print(json.dumps(found, indent=None if arguments.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
