"""Trains the emulator: alone, or as a rank of torchrun, srun or mpirun.

python scripts/train.py --create-data
torchrun --nproc_per_node=4 scripts/train.py --config config.yaml
srun python scripts/train.py --config config.yaml epochs=40

Options that it does not know are those of `samestep train`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

RECIPE = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the emulator, in this process or as a rank.")
    parser.add_argument("--config", type=Path, default=RECIPE / "config.yaml")
    parser.add_argument("--create-data", action="store_true", help="write made-up fields to ./data, and end")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument("--restart-from-best", action="store_true", help="begin again at the run's best checkpoint")
    begin.add_argument("--restart-from-checkpoint", metavar="PATH", help="begin at another checkpoint, or run")
    parser.add_argument("--local-rank", "--local_rank", help="passed by older launchers")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    given, others = parser.parse_known_intermixed_args(arguments)
    if given.create_data:
        sys.path.insert(0, str(RECIPE))
        from fields import main as make

        sys.exit(make(["data"]))
    words = ["train", str(given.config), *given.overrides, *others]
    if given.restart_from_best:
        words.append("resume.checkpoint=best")
    if given.restart_from_checkpoint:
        words.append(f"resume.checkpoint={given.restart_from_checkpoint}")
    if given.local_rank:
        words += ["--local-rank", given.local_rank]
    from samestep.cli import main as samestep

    sys.argv = ["samestep", *words]
    samestep()


if __name__ == "__main__":
    main()
