"""Seconds until `samestep ui` has sent its pages: many long runs, and one of them.

python benchmarks/live_view.py --runs 200 --steps 100000
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from samestep.cli.ui.command import find_all
from samestep.cli.ui.pages import Pages
from samestep.cli.ui.view import View, live_page


def main() -> None:
    """Write runs, and time the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        size = _write_runs(runs, given.runs, given.steps)
        print(f"{given.runs} runs of {given.steps:,} steps, {size / 1e6:.0f} MB of numbers each")
        pages = Pages(find_all([runs]))
        for words, address in (("all runs", ""), ("all runs, again", ""), ("one run", f"run?path={runs}/run-000")):
            view = pages.at(address)
            assert view is not None
            print(f"{words:<16} {_seconds(view):6.2f} s")


def _seconds(view: View) -> float:
    began = time.perf_counter()
    live_page(view)
    return time.perf_counter() - began


def _write_runs(folder: Path, count: int, steps: int) -> int:
    first = folder / "run-000"
    first.mkdir(parents=True)
    metrics = first / "metrics.jsonl"
    with metrics.open("w", encoding="utf-8") as file:
        for step in range(steps):
            row = {
                "step": step, "epoch": step // 1000, "loss": 2 / (1 + step / 1e4), "count": 64.0, "lr": 0.01,
                "seconds": 0.0123456789, "grad_norm": 1 / (1 + step % 7),
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
    for number in range(count):
        run = folder / f"run-{number:03d}"
        run.mkdir(exist_ok=True)
        result = {
            "status": "finished", "reason": None, "steps": steps, "seconds": 1.0, "world": 4, "loss": 0.18,
            "metrics": {}, "best": None, "checkpoints": {},
        }  # fmt: skip
        (run / "result.json").write_text(json.dumps(result), encoding="utf-8")
        if number:
            os.link(metrics, run / "metrics.jsonl")
    return metrics.stat().st_size


if __name__ == "__main__":
    main()
