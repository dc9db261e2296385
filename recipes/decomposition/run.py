"""Runs the whole recipe, command by command, and writes a page of results.

python recipes/decomposition/run.py build/decomposition --ranks 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import differences
from report import write_results

from samestep.checkpoint.ownership import claim_empty
from samestep.errors import SamestepError, UserError

HERE = Path(__file__).parent.resolve()
EXPERIMENTS = ("tms_5-2", "tms_40-10", "residual_mlp", "language")
AT_EVERY_SIZE = "language"
"""What is decomposed to its end on one, two and four ranks."""


class Recipe:
    """The commands, each as a person would type it in the folder that everything goes to."""

    def __init__(self, folder: Path, ranks: int, overrides: Sequence[str]) -> None:
        self.folder, self.ranks, self.overrides = folder, ranks, overrides
        self.seconds: dict[str, float] = {}

    def samestep(self, what: str, *given: str | Path) -> str:
        """Run a command, show what was typed, and return what it prints."""
        words = [sys.executable, "-m", "samestep", *map(str, given)]
        print(f"\n$ samestep {' '.join(words[3:])}", flush=True)
        started = time.monotonic()
        done = subprocess.run(
            words, stdout=subprocess.PIPE, text=True, check=False, cwd=self.folder
        )
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - started
        if done.returncode:
            sys.exit(f"run.py: {what} failed with exit code {done.returncode}")
        if not done.stdout.startswith("{"):
            print(done.stdout, end="", flush=True)
        return done.stdout

    def decompose(self, name: str) -> None:
        """Train the target and decompose it; the language model on every number of ranks."""
        config, ranks = HERE / "config" / name, ["--nproc", str(self.ranks)]
        self.samestep(f"{name}: target", "launch", config / "target.yaml", *ranks, *self.overrides)
        if name != AT_EVERY_SIZE:
            self.samestep(f"{name}: decomposition", "launch", config / "single.yaml", *ranks, *self.overrides)  # fmt: skip
            return
        self.samestep(f"{name}: on one process", "train", config / "single.yaml", *self.overrides)
        for size in ("two", "four"):
            self.samestep(f"{name}: on {size} ranks", "launch", config / f"{size}.yaml", *self.overrides)  # fmt: skip

    def verify(self, name: str) -> dict[str, Any]:
        """A few steps on one, two and four ranks, evaluations included."""
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
    parser = argparse.ArgumentParser(description="Run the recipe and write a page of results.")
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--experiments", default=",".join(EXPERIMENTS), help="some of the four")
    parser.add_argument(
        "--overwrite", action="store_true", help="empty the folder of an earlier start first"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every training")
    given = parser.parse_intermixed_args(arguments)
    names = given.experiments.split(",")
    recipe = Recipe(given.folder, given.ranks, given.overrides)
    try:
        if wrong := set(names) - set(EXPERIMENTS):
            raise UserError(f"--experiments: {', '.join(wrong)} is none of {', '.join(EXPERIMENTS)}")  # fmt: skip
        claim_empty(given.folder, "recipe", given.overwrite)
        for name in names:
            recipe.decompose(name)
        proofs = {name: recipe.verify(name) for name in names if name != AT_EVERY_SIZE}
        compared = recipe.compared() if AT_EVERY_SIZE in names else {}
        page = given.folder / "results.html"
        results = write_results(given.folder, names, proofs, compared, recipe.seconds, page)
        (given.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    except SamestepError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\n{json.dumps(results, indent=1)}\nResults: {page}")
    return 0 if results["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
