"""Runs the whole recipe, command by command, and writes a page of results.

python recipes/metric_learning/run.py build/metric_learning --nproc 2
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from report import write_results

from samestep.errors import NO_SUGGESTION

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipe import Commands, options, run_in

HERE = Path(__file__).parent.resolve()


class Recipe(Commands):
    """The commands of this recipe."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(folder.resolve(), ranks)
        self.first, self.second = self.folder / "first", self.folder / "second"

    def make_data(self, kind: str, per_class: int | None) -> None:
        images, data = self.folder / "images", self.folder / "data"
        fewer = [] if per_class is None else ["--per-class", str(per_class)]
        self.python("images", HERE / "images.py", kind, images, *fewer)
        self.python("split", HERE / "split.py", images, data, "--mode", "fixed", "--val-share", "0.2")

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
            allow=(0, NO_SUGGESTION),
        )  # fmt: skip
        found: dict[str, object] = json.loads(text)
        suggested = found["suggestions"]
        rate = [f"optimizer.lr={suggested['valley']}"] if isinstance(suggested, dict) and suggested else []
        self.samestep("stage 2", "launch", config, "--nproc", str(self.ranks), *common, *rate)
        return found

    def use(self) -> None:
        """Predict a folder, draw the embeddings, write files for others."""
        labels = self.folder / "labels.csv"
        self.samestep("predict", "predict", self.second, self.folder / "data" / "valid", "--output", labels)
        self.samestep(
            "embeddings", "plot", self.first, "--embeddings", "--weights", "average", "--report",
            self.folder / "embeddings.html",
        )  # fmt: skip
        for run, weights in ((self.first, "ema"), (self.second, "raw")):
            target = self.folder / f"{run.name}.pt"
            self.samestep("export", "export", run, "--to", "pt", "--output", target, "--weights", weights)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    parser.add_argument("--images", choices=["digits", "shapes"], default="digits")
    parser.add_argument("--per-class", type=int, help="images of each class, at most")
    given = parser.parse_intermixed_args(arguments)
    recipe = Recipe(given.folder, given.nproc)

    def follow(page: Path) -> None:
        recipe.make_data(given.images, given.per_class)
        recipe.first_stage(given.overrides)
        range_test = recipe.second_stage(given.overrides)
        recipe.use()
        write_results(recipe.first, recipe.second, range_test, recipe.folder, recipe.seconds, page)

    return run_in(given.folder, given.force, follow)


if __name__ == "__main__":
    sys.exit(main())
