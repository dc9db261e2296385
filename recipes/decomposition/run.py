"""Runs the whole recipe, command by command, and writes a page of results.

python recipes/decomposition/run.py build/decomposition --nproc 2
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import differences
from report import write_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipe import Commands, options, run_in

HERE = Path(__file__).parent.resolve()
EXPERIMENTS = ("tms_5-2", "tms_40-10", "residual_mlp", "language")
AT_EVERY_SIZE = "language"
"""What is decomposed to its end on one, two and four ranks."""


class Recipe(Commands):
    """The commands of this recipe."""

    def __init__(self, folder: Path, ranks: int, overrides: Sequence[str]) -> None:
        super().__init__(folder, ranks)
        self.overrides = overrides

    def decompose(self, name: str) -> None:
        """Train the target and decompose it; the language model on every number of ranks."""
        config, ranks = HERE / "config" / name, ["--nproc", str(self.ranks)]
        self.samestep(f"{name}: target", "launch", config / "target.yaml", *ranks, *self.overrides)
        if name != AT_EVERY_SIZE:
            self.samestep(f"{name}: decomposition", "launch", config / "single.yaml", *ranks, *self.overrides)
            return
        self.samestep(f"{name}: on one process", "train", config / "single.yaml", *self.overrides)
        for size in ("two", "four"):
            self.samestep(f"{name}: on {size} ranks", "launch", config / f"{size}.yaml", *self.overrides)

    def verify(self, name: str) -> dict[str, Any]:
        """Return a few steps on one, two and four ranks, evaluations included."""
        found = self.samestep(
            f"{name}: verify", "verify", HERE / "config" / name / "single.yaml", "--worlds", "1,2,4", "--steps", "4",
            "--json", f"run_dir=proof/{name}", *self.overrides, "evaluation.every_steps=2",
        )  # fmt: skip
        proof: dict[str, Any] = json.loads(found)
        return proof

    def compared(self) -> dict[str, list[str]]:
        """By run, what of it differs from one process."""
        runs = self.folder / "runs"
        names = [f"{AT_EVERY_SIZE}-{size}" for size in ("two", "four")]
        return {name: list(differences(runs / AT_EVERY_SIZE, runs / name)) for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    parser.add_argument("--experiments", default=",".join(EXPERIMENTS), help="some of the four")
    given = parser.parse_intermixed_args(arguments)
    names = given.experiments.split(",")
    if wrong := set(names) - set(EXPERIMENTS):
        parser.error(f"--experiments: {', '.join(wrong)} is none of {', '.join(EXPERIMENTS)}")
    recipe = Recipe(given.folder, given.nproc, given.overrides)

    def follow(page: Path) -> dict[str, Any]:
        for name in names:
            recipe.decompose(name)
        proofs = {name: recipe.verify(name) for name in names if name != AT_EVERY_SIZE}
        compared = recipe.compared() if AT_EVERY_SIZE in names else {}
        return write_results(given.folder, names, proofs, compared, recipe.seconds, page)

    return run_in(given.folder, given.force, follow)


if __name__ == "__main__":
    sys.exit(main())
