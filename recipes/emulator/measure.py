"""Measures how fast the emulator trains on several numbers of ranks, and what memory each rank needs.

python recipes/emulator/measure.py build/emulator_sizes --worlds 1,2,4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.errors import LaunchError, OutputError, SamestepError

HERE = Path(__file__).parent.resolve()


def measure(folder: Path, world: int, options: Sequence[str], overrides: Sequence[str]) -> Any:
    """Train 60 steps on so many ranks: samples in a second, and each rank's memory."""
    run = folder / f"on-{world}"
    command = [
        sys.executable, "-m", "samestep", "launch", str(HERE / "config.yaml"), *options, f"run_dir={run}", "epochs=null", "steps=60",
        "evaluation.every_epochs=null", "checkpoint.enabled=false", "log_every=5", *overrides,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise LaunchError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    speeds = [row["samples_per_second"] for row in map(json.loads, lines) if "samples_per_second" in row]
    memory = json.loads((run / "files" / "memory.json").read_text(encoding="utf-8"))
    return {
        "world": world,
        # The first ones read the data.
        "samples_per_second": statistics.median(speeds[1:] or speeds),
        "patterns": max(rank["patterns"] for rank in memory),
        "peak_bytes": max(rank["peak_bytes"] for rank in memory),
        "load": os.getloadavg()[0],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure speed and memory on numbers of ranks.")
    parser.add_argument("folder", type=Path, help="where everything goes; new or empty")
    parser.add_argument("--worlds", default="1,2,4")
    parser.add_argument("--times", type=int, default=240)
    parser.add_argument("--size", type=int, nargs=2, default=(96, 128), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--via", help="slurm or srun: a node for each rank; otherwise on this machine")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    given = parser.parse_intermixed_args(arguments)
    try:
        if given.folder.exists() and any(given.folder.iterdir()):
            raise OutputError(f"{given.folder} is not empty: give another folder")
        given.folder.mkdir(parents=True, exist_ok=True)
        make = [HERE / "fields.py", "data", "--times", str(given.times), "--size", *map(str, given.size)]
        subprocess.run([sys.executable, *map(str, make)], check=True, cwd=given.folder)
        found = []
        for world in map(int, given.worlds.split(",")):
            options = ["--nproc", str(world)]
            if given.via:
                options = ["--via", given.via, "--nodes", str(world), "--nproc", "1"]
                options += ["--follow"] if given.via == "slurm" else []
            found.append(measure(given.folder.resolve(), world, options, given.overrides))
            print(json.dumps(found[-1]), flush=True)
        (given.folder / "sizes.json").write_text(json.dumps(found), encoding="utf-8")
    except SamestepError as error:
        print(f"measure.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
