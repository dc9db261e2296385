"""What every recipe's run.py has: commands that are shown, timed and checked, and the options of all."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samestep.checkpoint.ownership import claim_empty
from samestep.errors import SamestepError


class Commands:
    """Runs commands as a person would type them in the folder that everything goes to."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        self.folder, self.ranks = folder, ranks
        self.seconds: dict[str, float] = {}

    def run(self, what: str, command: Sequence[str | Path], allow: Sequence[int] = (0,)) -> str:
        """Run a command, show what was typed, and return what it prints."""
        words = [str(word) for word in command]
        shown = ["python", *words[1:]] if words[0] == sys.executable else words
        print(f"\n$ {' '.join(shown)}", flush=True)
        started = time.monotonic()
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, cwd=self.folder)
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - started
        if not done.stdout.startswith("{"):
            print(done.stdout, end="", flush=True)
        if done.returncode not in allow:
            sys.exit(f"run.py: {what} failed with exit code {done.returncode}")
        return done.stdout

    def python(self, what: str, *words: str | Path, allow: Sequence[int] = (0,)) -> str:
        return self.run(what, [sys.executable, *words], allow)

    def samestep(self, what: str, *words: str | Path, allow: Sequence[int] = (0,)) -> str:
        return self.python(what, "-m", "samestep", *words, allow=allow)


def options(ranks: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that all recipes have; `ranks` if they take a number of ranks."""
    parser = argparse.ArgumentParser(description="Run the recipe and write a page of results.")
    parser.add_argument("folder", type=Path, help="where everything goes")
    if ranks:
        parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--force", action="store_true", help="empty the folder of an earlier start first")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every training")
    return parser


def run_in(folder: Path, force: bool, recipe: Callable[[Path], dict[str, Any] | None]) -> int:
    """Run a recipe in a folder of its own, and return the exit code.

    Args:
        folder: Where everything goes.
        force: Whether the folder of an earlier start is emptied.
        recipe: Called with the path of the page that it is to write; figures that it returns go into results.json,
            and if `same` among them is false, the exit code is 1.
    """
    page = folder / "results.html"
    try:
        claim_empty(folder, "recipe", force)
        results = recipe(page)
    except SamestepError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return error.exit_code
    if results is not None:
        text = json.dumps(results, indent=1)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}")
    print(f"\nResults: {page}")
    return 0 if results is None or results["same"] else 1
