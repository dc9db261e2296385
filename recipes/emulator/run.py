"""Runs the whole recipe, command by command, and writes a page of results.

python recipes/emulator/run.py build/emulator --nproc 2
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from report import write_results

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipe import Commands, options, run_in

HERE = Path(__file__).parent.resolve()
CONFIG, CPP = HERE / "config.yaml", HERE.parent.parent / "examples" / "cpp"


class Recipe(Commands):
    """The commands of this recipe."""

    def train(self, overrides: Sequence[str]) -> None:
        """A training to the end, and one that lowers its rate on plateaus and ends with the Jacobian."""
        ranks = ["--nproc", str(self.ranks)]
        self.samestep("training", "launch", CONFIG, *ranks, *overrides)
        stopping = "params.jacobian_stopping={tolerance: 0.02, patience: 3, least_evaluations: 5}"
        plateau = ["schedule={name: plateau, args: {patience: 1, factor: 0.5}}"]
        self.samestep(
            "training until the Jacobian is still", "launch", CONFIG, *ranks, *overrides, "name=still",
            "params.loss=huber", stopping, *plateau,
        )  # fmt: skip

    def verify(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the same on one, two and four ranks, evaluations included."""
        found = self.samestep(
            "verify", "verify", CONFIG, "--worlds", "1,2,4", "--steps", "8", "--json", "run_dir=proof",
            *overrides, "evaluation.every_steps=4",
        )  # fmt: skip
        proof: dict[str, Any] = json.loads(found)
        return proof

    def export(self) -> dict[str, Any] | None:
        """TorchScript, and its numbers in C++; None where C++ cannot be compiled."""
        self.samestep("export", "export", "runs/emulator", "--to", "torchscript")
        if shutil.which("cmake") is None or shutil.which("c++") is None:
            print("no C++: there is no cmake, or no compiler", flush=True)
            return None
        torch_is = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
        self.run("C++", ["cmake", "-S", CPP, "-B", "cpp", torch_is])
        self.run("C++", ["cmake", "--build", "cpp"])
        found = self.python(
            "C++ compared", HERE / "compare_cpp.py", "runs/emulator", "runs/emulator/export/emulator.ts",
            "cpp/infer", "--json",
        )  # fmt: skip
        compared: dict[str, Any] = json.loads(found)
        return compared


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    parser.add_argument("--times", type=int, default=40, help="states of the made-up fields")
    parser.add_argument("--size", type=int, nargs=2, default=(48, 64), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--no-cpp", action="store_true", help="compile nothing")
    given = parser.parse_intermixed_args(arguments)
    recipe = Recipe(given.folder, given.nproc)

    def follow(page: Path) -> None:
        sizes = ["--times", str(given.times), "--size", *map(str, given.size)]
        recipe.python("fields", HERE / "fields.py", "data", *sizes)
        recipe.train(given.overrides)
        proof = recipe.verify(given.overrides)
        compared = None if given.no_cpp else recipe.export()
        write_results(given.folder, proof, compared, recipe.seconds, page)

    return run_in(given.folder, given.force, follow)


if __name__ == "__main__":
    sys.exit(main())
