"""Searches by the name of a profile: `local_sweeps.py smoke` is `samestep sweep run config/hpo/smoke.yaml`.

python recipes/token_classification/local_sweeps.py smoke folds.k=2 trials=4
"""

from __future__ import annotations

import sys
from pathlib import Path

from samestep.cli import main as samestep

PROFILES = Path(__file__).parent / "config" / "hpo"


def main() -> None:
    names = sorted(path.stem for path in PROFILES.glob("*.yaml"))
    profile, *overrides = sys.argv[1:] or [""]
    if profile not in names:
        print(
            f"local_sweeps: the profile is {profile!r}: give one of {', '.join(names)}, then key=value", file=sys.stderr
        )
        sys.exit(2)
    sys.argv = ["samestep", "sweep", "run", str(PROFILES / f"{profile}.yaml"), *overrides]
    samestep()


if __name__ == "__main__":
    main()
