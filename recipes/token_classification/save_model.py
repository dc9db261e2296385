"""Writes a run's model and its tokenizer as a folder that transformers loads.

python recipes/token_classification/save_model.py runs/entities model
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samestep.errors import OutputError, SamestepError
from samestep.models.trained_model import load_trained


def save_model(run: Path, folder: Path, which: str, overrides: Sequence[str]) -> None:
    """Write the folder.

    Args:
        run: the run's directory.
        folder: a new or empty one.
        which: the checkpoint: best, last or the number of a step.
        overrides: values of the run's config that are others here, such as params.data.
    """
    if folder.exists() and any(folder.iterdir()):
        raise OutputError(f"{folder} is not empty: give another folder")
    trained: Any = load_trained(run, which, overrides=overrides)
    trained.model.save_pretrained(folder)
    trained.task.tokenizer.save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a run's model for transformers.")
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("--which", default="best", help="best, last, or the number of a step")
    parser.add_argument("overrides", nargs="*", help="section.key=value, such as params.data=...")
    given = parser.parse_intermixed_args()
    try:
        save_model(given.run, given.folder, given.which, given.overrides)
    except SamestepError as error:
        print(f"save_model: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
