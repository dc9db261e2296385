"""Runs the whole recipe, command by command, and writes a page of results.

python recipes/metric_learning/run.py build/metric_learning --ranks 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from report import write_results

from samestep.checkpoint.ownership import claim_empty
from samestep.errors import NO_SUGGESTION, SamestepError

HERE = Path(__file__).parent


class Recipe:
    """The commands, each as a person would type it, with everything below one folder."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.first, self.second = folder / "first", folder / "second"
        self.seconds: dict[str, float] = {}

    def python(self, what: str, *words: str | Path, allow: tuple[int, ...] = ()) -> str:
        """Run Python, show what was typed, and return what it prints."""
        command = [sys.executable, *map(str, words)]
        print(f"\n$ {' '.join(['python', *command[1:]])}", flush=True)
        started = time.monotonic()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        self.seconds[what] = time.monotonic() - started
        if done.returncode and done.returncode not in allow:
            sys.exit(f"run.py: {what} failed with exit code {done.returncode}")
        if not done.stdout.startswith("{"):
            print(done.stdout, end="", flush=True)
        return done.stdout

    def samestep(self, what: str, *words: str | Path, allow: tuple[int, ...] = ()) -> str:
        return self.python(what, "-m", "samestep", *words, allow=allow)

    def make_data(self, kind: str, per_class: int | None) -> None:
        images, data = self.folder / "images", self.folder / "data"
        fewer = [] if per_class is None else ["--per-class", str(per_class)]
        self.python("images", HERE / "images.py", kind, images, *fewer)
        self.python(
            "split", HERE / "split.py", images, data, "--mode", "fixed", "--val-share", "0.2"
        )

    def first_stage(self, overrides: list[str]) -> None:
        self.samestep(
            "stage 1", "launch", HERE / "first.yaml", "--nproc", str(self.ranks), f"run_dir={self.first}",
            f"params.data={self.folder / 'data'}", *overrides,
        )  # fmt: skip
        self.samestep("average", "average", self.first, "--best", "3", "--json")

    def second_stage(self, overrides: list[str]) -> dict[str, object]:
        """Train it with the rate that a range test suggests; the range test's numbers."""
        common = [
            f"run_dir={self.second}", f"params.data={self.folder / 'data'}",
            f"params.first={self.first / 'average.safetensors'}", *overrides,
        ]  # fmt: skip
        config = HERE / "second.yaml"
        # Exit code 8: no suggestion, so the config's rate stays.
        text = self.samestep(
            "tune lr", "tune", "lr", config, *common, "--from", "1e-3", "--steps", "50",
            "--smooth", "0.1", "--json",
            allow=(NO_SUGGESTION,),
        )  # fmt: skip
        found: dict[str, object] = json.loads(text)
        suggested = found["suggestions"]
        rate = (
            [f"optimizer.lr={suggested['valley']}"]
            if isinstance(suggested, dict) and suggested
            else []
        )
        self.samestep(
            "stage 2", "launch", config, "--nproc", str(self.ranks), *common, *rate
        )  # fmt: skip
        return found

    def use(self) -> None:
        """Predict a folder, draw the embeddings, write files for others."""
        labels = self.folder / "labels.csv"
        self.samestep(
            "predict", "predict", self.second, self.folder / "data" / "valid", "--output", labels
        )
        self.samestep(
            "embeddings", "plot", self.first, "--embeddings", "--weights", "average", "--report",
            self.folder / "embeddings.html",
        )  # fmt: skip
        for run, weights in ((self.first, "ema"), (self.second, "raw")):
            target = self.folder / f"{run.name}.pt"
            self.samestep(
                "export", "export", run, "--to", "pt", "--output", target, "--weights", weights
            )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the recipe and write a page of results.")
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--images", choices=["digits", "shapes"], default="digits")
    parser.add_argument("--per-class", type=int, help="images of each class, at most")
    parser.add_argument(
        "--overwrite", action="store_true", help="empty the folder of an earlier start first"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value, for both stages")
    given = parser.parse_intermixed_args(arguments)
    recipe = Recipe(given.folder, given.ranks)
    try:
        claim_empty(given.folder, "recipe", given.overwrite)
        recipe.make_data(given.images, given.per_class)
        recipe.first_stage(given.overrides)
        range_test = recipe.second_stage(given.overrides)
        recipe.use()
        page = given.folder / "results.html"
        write_results(recipe.first, recipe.second, range_test, recipe.folder, recipe.seconds, page)
    except SamestepError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\nResults: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
