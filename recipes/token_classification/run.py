"""Runs the whole recipe, command by command, and writes a page of results.

python recipes/token_classification/run.py build/token_classification --nproc 2
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import write_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipe import Commands, options, run_in

HERE = Path(__file__).parent.resolve()
TRAIN, SMOKE = HERE / "config" / "train.yaml", HERE / "config" / "hpo" / "smoke.yaml"


class Recipe(Commands):
    """The commands of this recipe."""

    def train(self, overrides: Sequence[str]) -> None:
        """A training on the training documents, measured on the validation documents."""
        ranks = ["--nproc", str(self.ranks)]
        self.samestep("training", "launch", TRAIN, *ranks, *overrides)
        self.samestep("predictions", "predict", "runs/entities", "valid", "--output", "predictions.jsonl")

    def search(self, folds: int, overrides: Sequence[str]) -> dict[str, Any]:
        """Return a short search; its trials."""
        # What is the same in all trials is a choice of one.
        fixed = [f"space.{key}={{choice: [{value}]}}" for key, _, value in map(_parts, overrides)]
        found = self.samestep(
            "search", "sweep", "run", SMOKE, f"folds.k={folds}", f"parallel={self.ranks}", "--json", *fixed
        )
        trials: dict[str, Any] = json.loads(found)
        return trials

    def refit(self, epochs: int) -> None:
        """The final training: the best trial's values, on all documents."""
        best = self.samestep("best", "sweep", "best", "smoke", "--config")
        (self.folder / "best.yaml").write_text(best, encoding="utf-8")
        ranks = ["--nproc", str(self.ranks)]
        self.samestep("final training", "launch", "best.yaml", *ranks, "refit=true", "name=final", f"epochs={epochs}")
        self.python("model folder", HERE / "save_model.py", "runs/final", "model")

    def export(self) -> dict[str, Any]:
        """ONNX files, plain and int8, of the training whose validation documents are unseen."""
        onnx, quantized = "runs/entities/export/entities.onnx", "entities-int8.onnx"
        self.samestep("export", "export", "runs/entities", "--to", "onnx")
        found = self.python("int8", HERE / "quantize.py", "runs/entities", onnx, quantized, "--json")
        compared: dict[str, Any] = json.loads(found)
        return compared


def _parts(override: str) -> tuple[str, str, str]:
    return override.partition("=")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    parser.add_argument("--train", type=int, default=2400, help="documents to train on")
    parser.add_argument("--valid", type=int, default=300, help="documents to validate with")
    parser.add_argument("--folds", type=int, default=2, help="of the search")
    parser.add_argument("--epochs", type=int, default=6, help="of both trainings")
    given = parser.parse_intermixed_args(arguments)
    recipe = Recipe(given.folder, given.nproc)

    def follow(page: Path) -> None:
        counts = ["--train", str(given.train), "--valid", str(given.valid)]
        recipe.python("documents", HERE / "made_up.py", "data", *counts)
        recipe.train([*given.overrides, f"epochs={given.epochs}"])
        sweep = recipe.search(given.folds, given.overrides)
        recipe.refit(given.epochs)
        write_results(given.folder, sweep, recipe.export(), recipe.seconds, page)

    return run_in(given.folder, given.force, follow)


if __name__ == "__main__":
    sys.exit(main())
