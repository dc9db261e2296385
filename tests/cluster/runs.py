"""Trainings on the cluster, and the run that nobody touched to compare them with."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from samestep.train.record import RunRecord
from tests.cluster.hosts import Hosts

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests" / "distributed" / "tasks.py"
STEPS = 12
PATIENCE = 300.0
"""Seconds that tests wait for something to happen, on a machine that is busy with others."""


interpreter: list[Path] = []
"""The preloaded one, where there are hosts."""


@dataclass(frozen=True)
class Training:
    """A config in a folder that all hosts share, and the interpreter that runs it."""

    folder: Path
    python: str

    @classmethod
    def write(cls, folder: Path, *, cold: str = "", **values: Any) -> Training:
        """BatchNorm, dropout, augmentation, clipping and an uneven tail: 12 steps of 8 lanes.

        Its processes on the hosts are forked by servers that have torch imported, unless there is
        a reason, `cold`, for interpreters that start from nothing.
        """
        python = str(sys.executable if cold or not interpreter else interpreter[0])
        config = {
            "task": f"{TASKS}:Everything",
            "seed": 5,
            "epochs": 4,
            "global_batch": 32,
            "lanes": 8,
            "clip": {"norm": 1.0},
            "log_every": 1,
            "evaluation": {"every_epochs": None},
            **values,
        }
        section = {"device": "cpu", "threads_per_rank": 1, "timeout": 60.0}
        config["distributed"] = {**section, **values.get("distributed", {})}
        config["launch"] = {"python": python, **values.get("launch", {})}
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return cls(folder, python)

    @classmethod
    def slow(cls, folder: Path, **values: Any) -> Training:
        """One that lasts half a minute, until it is told to hurry; it ends as any other."""
        params = {"seconds": 0.3, "hurry": str(folder / "hurry")}
        return cls.write(folder, task=f"{TASKS}:Slow", params=params, **values)

    def hurry(self) -> None:
        """From now on let a slow run take no longer than it must."""
        (self.folder / "hurry").touch()

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}

    @property
    def by_hand(self) -> dict[str, str]:
        """For agents that somebody starts on each machine, who sets their secret."""
        return {**self.environment, "SAMESTEP_SECRET": "of tests, and no secret at all"}

    def command(self, name: str, *arguments: str | Path) -> list[str]:
        """`samestep NAME config.yaml ...`."""
        words = [self.python, "-m", "samestep", name, self.folder / "config.yaml", *arguments]
        return [str(word) for word in words]

    def launch(self, run: str, *arguments: str | Path) -> list[str]:
        """`samestep launch` of a run in its own directory, which keeps its record."""
        folder = self.folder / run
        return self.command("launch", f"run_dir={folder}", "--record", folder / "record", *arguments)

    def record(self, run: str) -> RunRecord:
        return RunRecord.read(self.folder / run / "record")

    def steps_of(self, run: str) -> int:
        """Steps that a run has written to its metrics so far."""
        path = self.folder / run / "metrics.jsonl"
        if not path.exists():
            return 0
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return max((line["step"] + 1 for line in lines if "loss" in line), default=0)


def is_same(one: RunRecord, other: RunRecord) -> bool:
    """Whether two runs are the same to the bit."""
    return one.losses == other.losses and one.state_hash == other.state_hash and len(set(one.rank_hashes)) == 1


def wait_for(what: Callable[[], bool], seconds: float = PATIENCE) -> float:
    """Wait until something is so; the seconds it took."""
    start = time.monotonic()
    while not what():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - start


def by_rsh(hosts: Hosts) -> dict[str, str]:
    """What lets OpenMPI start ranks on the other hosts."""
    return {"OMPI_MCA_plm_rsh_agent": str(hosts.rsh), "OMPI_MCA_oob_tcp_if_include": "eth0"}
