"""Runs the whole recipe, training by training, and writes a page of results.

python recipes/vision_language/run.py build/vision_language
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import write_results
from trainings import Training

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipe import Commands, options, run_in

HERE = Path(__file__).parent.resolve()
WORLDS = (1, 2, 4)
SAVED_ON, RESUMED_ON = 2, (1, 4)
"""Ranks of the training whose checkpoint is resumed, and ranks that resume it."""


class Recipe(Commands):
    """The commands of this recipe."""

    def __init__(self, folder: Path, steps: int, overrides: Sequence[str]) -> None:
        super().__init__(folder.resolve())
        self.steps, self.overrides = steps, overrides

    def train(self, name: str, world: int, precision: str, *words: str) -> Training:
        """Return a training on so many ranks."""
        target = self.folder / name
        # Ranks that share a machine's GPU cannot talk by nccl.
        settings = [f"precision={precision}", f"steps={self.steps}", "distributed.backend=gloo"]
        script = [HERE / "train.py", HERE / "config.yaml", target, *words, *settings, *self.overrides]
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        self.python(name, *(ranks if world > 1 else []), *script)
        return Training(target)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(ranks=False)
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    parser.add_argument("--held-out", type=int, default=256, help="held-out pictures to describe")
    given = parser.parse_intermixed_args(arguments)
    if given.steps < 4:
        parser.error(f"--steps is {given.steps}: give 4 or more")
    recipe = Recipe(given.folder, given.steps, given.overrides)

    def follow(page: Path) -> dict[str, Any]:
        half, pictures = given.steps // 2, f"--held-out={given.held_out}"
        # The overflow comes before the checkpoint, which holds the scale that it left.
        planted = [f"--overflow={half // 2}", f"--save-at={half}", pictures]
        fp16 = [recipe.train(f"fp16-{world}", world, "fp16", *planted) for world in WORLDS]
        bf16 = [recipe.train(f"bf16-{world}", world, "bf16", pictures) for world in WORLDS]
        state = recipe.folder / f"fp16-{SAVED_ON}" / f"step-{half}.pt"
        resumed = [
            recipe.train(f"resumed-{world}", world, "fp16", f"--resume={state}", pictures) for world in RESUMED_ON
        ]
        return write_results(fp16, bf16, resumed, half // 2, recipe.seconds, page)

    return run_in(given.folder, given.force, follow)


if __name__ == "__main__":
    sys.exit(main())
