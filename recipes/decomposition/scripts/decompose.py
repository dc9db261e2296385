"""Trains a target or its decomposition: alone, or as a rank of torchrun, mpirun or srun.

python scripts/decompose.py config/language/single.yaml
torchrun --nproc_per_node=2 scripts/decompose.py config/language/two.yaml
mpirun -np 2 python scripts/decompose.py config/language/two.yaml steps=100

It is `samestep train`, whose options it takes.
"""

from __future__ import annotations

import sys


def main() -> None:
    from samestep.cli import main as samestep

    sys.argv = ["samestep", "train", *sys.argv[1:]]
    samestep()


if __name__ == "__main__":
    main()
