"""Runs the sameness matrix and writes its table.

    python -m tests.sameness.matrix --write docs/sameness.md
    python -m tests.sameness.matrix --models vit,gan_joint --worlds 1,2 --ways eager
    python -m tests.sameness.matrix --device cuda --json build/sameness.json

Exits with 1 if anything is different, or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Before anything imports torch: libraries read it only then.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.ranks import preload
from tests.sameness.case import WORLDS, Case
from tests.sameness.cases import CASES
from tests.sameness.cells import BAD, Cell, Plan, run_row
from tests.sameness.table import one_line, page, summary
from tests.sameness.ways import WAYS

PRELOADED = (
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "datasets",
    *(f"tests.sameness.models.{name}" for name in (
        "images", "sequences", "two_sided", "followers", "unusual", "reading",
    )),
    "samestep.train.start",
    "torchmetrics.classification",
)  # fmt: skip
"""What the models import, once for all ranks."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(sys.argv[1:] if arguments is None else list(arguments))
    cases = _chosen("--models", options.models, {case.name: case for case in CASES})
    ways = _chosen("--ways", options.ways, {way.name: way for way in WAYS})
    ways = [way for way in ways if way.only_on in ("", options.device)]
    worlds = None if options.worlds is None else [int(w) for w in options.worlds.split(",")]
    preload(*PRELOADED)
    started = time.monotonic()
    with ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        plan = Plan(ways, worlds, options.device, folder.resolve(), keep=bool(options.keep))
        cells = run_rows(plan, cases, options.jobs)
    seconds = time.monotonic() - started
    _report(cells, seconds)
    if options.json:
        _write(options.json, json.dumps([asdict(cell) for cell in cells], indent=1))
    if options.write:
        text = page(cases, ways, cells, _command(options), options.device, seconds)
        _write(options.write, text)
    return int(any(cell.verdict in BAD for cell in cells))


def run_rows(plan: Plan, cases: Sequence[Case], jobs: int) -> list[Cell]:
    """Run rows at the same time, `jobs` at once; their cells in the order of the rows."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    bar = progress.add_task("sameness", total=sum(map(plan.count, cases)))

    def run(case: Case) -> list[Cell]:
        cells = run_row(plan, case, _shown(progress, bar))
        if not console.is_terminal:
            spent = sum(cell.seconds for cell in cells)
            console.print(f"{case.name}: {summary(cells)} ({spent:.1f} s)", highlight=False)
        return cells

    pool = ThreadPoolExecutor(jobs)
    try:
        with progress:
            return [cell for cells in pool.map(run, cases) for cell in cells]
    finally:
        # When it is interrupted, rows that have not started are not run.
        pool.shutdown(cancel_futures=True)


def _shown(progress: Progress, bar: Any) -> Callable[[Cell], None]:
    def done(cell: Cell) -> None:
        progress.update(bar, advance=1, description=f"{cell.case} {cell.way} {cell.world}")

    return done


def _report(cells: Sequence[Cell], seconds: float) -> None:
    for cell in cells:
        if cell.verdict in BAD:
            where = f"{cell.case}, {cell.way} on {cell.world}"
            print(f"{cell.verdict}: {where}: {one_line(cell)}")
    print(f"{len(cells)} trainings in {seconds / 60:.1f} minutes: {summary(cells)}")


def _command(options: argparse.Namespace) -> str:
    """What gives the same page again."""
    if options.models or options.ways or options.worlds:
        return f"python -m tests.sameness.matrix {shlex.join(sys.argv[1:])}"
    return "make sameness" if options.device == "cpu" else f"make sameness DEVICE={options.device}"


def _write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def _chosen(option: str, names: str | None, known: dict[str, Any]) -> list[Any]:
    if names is None:
        return list(known.values())
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        sys.exit(f"{option}: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="rows, such as vit,gan_joint; all unless given")
    parser.add_argument("--worlds", help=f"numbers of ranks, of {','.join(map(str, WORLDS))}")
    parser.add_argument("--ways", help=f"of {','.join(way.name for way in WAYS)}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="rows at once")
    parser.add_argument("--json", help="a file for every cell")
    parser.add_argument("--write", help="a file for the table")
    parser.add_argument("--keep", help="a folder for the runs, which are removed unless given")
    options = parser.parse_args(arguments)
    if options.keep:
        shutil.rmtree(options.keep, ignore_errors=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
