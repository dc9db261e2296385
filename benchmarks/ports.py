"""What the ports of examples/ports cost on one core, beside the scripts that they were made from.

    python benchmarks/ports.py [--rounds N] [--json FILE]

Each script runs as it is, longer than by default, in a process of its own with one thread; scripts take turns. Processor time
from one update to the next is measured, and the median of a run counts: evaluations and saves between updates do not. The
goal is 1.15 of the original; where lanes cost more, the run's own log must say so (`said`).
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

PORTS = Path(__file__).resolve().parents[1] / "examples" / "ports"
LONGER = {
    "mnist": ["--epochs", "4"], "vae": ["--epochs", "4"], "gan": ["--epochs", "6"],
    "gpt": ["--max-iters", "60", "--eval-interval", "30"], "token_classifier": ["--epochs", "6"],
}  # fmt: skip
GOAL = 1.15


def measure_here(script: str, arguments: list[str]) -> None:
    """Run a script in this process; prints the processor time of an update as its last line."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(1)
    times: list[float] = []
    register_optimizer_step_post_hook(lambda *_: times.append(time.process_time()))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    spent = [after - before for before, after in pairwise(times)]
    optimizers = 2 if "gan" in Path(script).parent.name else 1
    # Two optimizers take turns: an update is both of them.
    spent = [sum(spent[at : at + optimizers]) for at in range(0, len(spent) - 1, optimizers)]
    print(json.dumps({"seconds": statistics.median(spent[len(spent) // 4 :])}))


def measure(name: str, kind: str, changes: str = "") -> tuple[float, bool]:
    """Return the seconds of an update, and whether the log said what lanes cost."""
    command = [sys.executable, __file__, "--here", str(PORTS / name / f"{kind}.py"), *LONGER[name]]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "SAMESTEP_ARGS": changes}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}/{kind}.py failed:\n{done.stderr[-2000:]}")
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return seconds, "times as long as without lanes" in done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure_here(options.here[0], options.here[1:])
        return
    rows = []
    print(f"{'port':18} {'ms':>7} {'8 lanes':>8} {'one lane':>9}  said what lanes cost")
    for name in LONGER:
        taken: dict[str, list[float]] = {"single": [], "default": [], "one": []}
        said = False
        for _ in range(options.rounds):
            taken["single"].append(measure(name, "single")[0])
            seconds, here = measure(name, "samestep_port")
            said = said or here
            taken["default"].append(seconds)
            taken["one"].append(measure(name, "samestep_port", "lanes=1")[0])
        plain, default, one = (min(values) for values in taken.values())
        rows.append({"port": name, "single_ms": 1e3 * plain, "default": default / plain, "one_lane": one / plain, "said": said})  # fmt: skip
        met = default / plain <= GOAL
        print(f"{name:18} {1e3 * plain:7.2f} {default / plain:8.2f} {one / plain:9.2f}  {'not needed' if met and not said else said}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
