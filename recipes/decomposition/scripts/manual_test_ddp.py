"""Compares a decomposition on several ranks with the same on one process: losses, metrics and checkpoints, to the bit.

python recipes/decomposition/scripts/manual_test_ddp.py build/ddp_test --worlds 2,4 --via torchrun,mpirun

It trains the target, decomposes it on one process, then on each number of ranks by each launcher. Its exit code is 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

RECIPE = Path(__file__).resolve().parent.parent
SCRIPT = RECIPE / "scripts" / "decompose.py"
CONFIGS = {1: "single.yaml", 2: "two.yaml", 4: "four.yaml"}
VIA = ("torchrun", "mpirun", "launch")


def command(via: str, ranks: int, config: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command line of so many ranks."""
    python, words = sys.executable, [str(config), *overrides]
    if ranks == 1:
        return [python, str(SCRIPT), *words]
    if via == "torchrun":
        return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(SCRIPT), *words]
    if via == "mpirun":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        options = ["--oversubscribe", "--bind-to", "none", "-x", "PATH"]
        options += ["-x", "PYTHONPATH"] if "PYTHONPATH" in os.environ else []
        return ["mpirun", "-np", str(ranks), *as_root, *options, python, str(SCRIPT), *words]
    return [python, "-m", "samestep", "launch", *words]


def run(folder: Path, words: Sequence[str]) -> None:
    print(f"$ {' '.join(words)}", flush=True)
    done = subprocess.run(words, cwd=folder, check=False)
    if done.returncode:
        sys.exit(f"manual_test_ddp.py: that failed with exit code {done.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare decompositions on ranks with one process.")
    parser.add_argument("folder", type=Path, help="where the runs go; new or empty")
    parser.add_argument("--experiment", default="tms_5-2", help="a folder of config/")
    parser.add_argument("--worlds", default="2", help="2, 4 or 2,4")
    parser.add_argument("--via", default="torchrun,mpirun", help=f"of {','.join(VIA)}")
    parser.add_argument("--steps", type=int, default=50, help="of the decomposition")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every training")
    given = parser.parse_intermixed_args(arguments)
    configs = RECIPE / "config" / given.experiment
    ranks, via = [int(one) for one in given.worlds.split(",")], given.via.split(",")
    if not configs.is_dir() or set(ranks) - {2, 4} or set(via) - set(VIA):
        parser.error("there is no such experiment, number of ranks or launcher")
    if "mpirun" in via and shutil.which("mpirun") is None:
        parser.error("there is no mpirun: install or load an MPI (module load openmpi), or give --via torchrun")
    if given.folder.exists() and any(given.folder.iterdir()):
        parser.error(f"{given.folder} is not empty: give another folder")
    given.folder.mkdir(parents=True, exist_ok=True)
    run(given.folder, command("", 1, configs / "target.yaml", [f"steps={given.steps}", *given.overrides]))
    length = [f"steps={given.steps}", f"evaluation.every_steps={given.steps}", *given.overrides]
    run(given.folder, command("", 1, configs / CONFIGS[1], [*length, "run_dir=one"]))
    names = []
    for number in ranks:
        for one in via:
            names.append(f"{one}-{number}")
            words = [*length, f"run_dir={names[-1]}"]
            run(given.folder, command(one, number, configs / CONFIGS[number], words))
    compared = [sys.executable, str(RECIPE / "compare.py"), "one", *names]
    return subprocess.run(compared, cwd=given.folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
