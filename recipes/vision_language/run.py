"""Runs the whole recipe, training by training, and writes a page of results.

python recipes/vision_language/run.py build/vision_language
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
from trainings import Training

from samestep.checkpoint.ownership import claim_empty
from samestep.errors import SamestepError, UserError

HERE = Path(__file__).parent.resolve()
WORLDS = (1, 2, 4)
SAVED_ON, RESUMED_ON = 2, (1, 4)
"""Ranks of the training whose checkpoint is resumed, and ranks that resume it."""


class Recipe:
    """The commands, each as a person would type it, with everything below one folder."""

    def __init__(self, folder: Path, steps: int, overrides: Sequence[str]) -> None:
        self.folder, self.steps, self.overrides = folder, steps, overrides
        self.seconds: dict[str, float] = {}

    def train(self, name: str, world: int, precision: str, *words: str) -> Training:
        """A training on so many ranks."""
        target = self.folder / name
        # Ranks that share a machine's GPU cannot talk by nccl.
        settings = [f"precision={precision}", f"steps={self.steps}", "distributed.backend=gloo"]
        script = [HERE / "train.py", HERE / "config.yaml", target, *words, *settings, *self.overrides]  # fmt: skip
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [sys.executable, *map(str, [*(ranks if world > 1 else []), *script])]
        print(f"\n$ {' '.join(['python', *command[1:]])}", flush=True)
        started = time.monotonic()
        done = subprocess.run(command, check=False)
        self.seconds[name] = time.monotonic() - started
        if done.returncode:
            sys.exit(f"run.py: {name} failed with exit code {done.returncode}")
        return Training(target)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the recipe and write a page of results.")
    parser.add_argument("folder", type=Path, help="where everything goes")
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    parser.add_argument("--held-out", type=int, default=256, help="held-out pictures to describe")
    parser.add_argument(
        "--overwrite", action="store_true", help="empty the folder of an earlier start first"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every training")
    given = parser.parse_intermixed_args(arguments)
    recipe = Recipe(given.folder, given.steps, given.overrides)
    try:
        if given.steps < 4:
            raise UserError(f"--steps is {given.steps}: give 4 or more")
        claim_empty(given.folder, "recipe", given.overwrite)
        half, pictures = given.steps // 2, f"--held-out={given.held_out}"
        # The overflow comes before the checkpoint, which holds the scale that it left.
        planted = [f"--overflow={half // 2}", f"--save-at={half}", pictures]
        fp16 = [recipe.train(f"fp16-{world}", world, "fp16", *planted) for world in WORLDS]
        bf16 = [recipe.train(f"bf16-{world}", world, "bf16", pictures) for world in WORLDS]
        state = given.folder / f"fp16-{SAVED_ON}" / f"step-{half}.pt"
        resumed = [
            recipe.train(f"resumed-{world}", world, "fp16", f"--resume={state}", pictures)
            for world in RESUMED_ON
        ]
        page = given.folder / "results.html"
        results = write_results(fp16, bf16, resumed, half // 2, recipe.seconds, page)
        (given.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    except SamestepError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\n{json.dumps(results, indent=1)}\nResults: {page}")
    return 0 if results["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
