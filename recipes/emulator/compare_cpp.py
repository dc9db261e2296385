"""Runs an exported emulator in C++, and compares its numbers with those of the trained model in Python.

python recipes/emulator/compare_cpp.py runs/emulator runs/emulator/export/emulator.ts build/infer
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.errors import ExportDiffers, ExportError, SamestepError
from samestep.models.trained_model import load_trained

METHODS = ("forward", "predict", "jac", "jac_physical")
TOLERANCE = 1e-6
"""Of the largest number of a result."""


def infer(program: Path, file: Path, methods: Sequence[str], x: Tensor) -> str:
    """Return what the program prints."""
    shape = "x".join(map(str, x.shape))
    numbers = [f"{value:.9g}" for value in x.flatten().tolist()]
    command = [str(program), str(file), shape, ",".join(methods), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExportError(f"{program} failed: {done.stderr.strip()}")
    return done.stdout


def numbers_of(output: str, method: str) -> Tensor:
    """Return a method's result: a line with its shape, and a line with its numbers."""
    lines = output.splitlines()
    place = next(at for at, line in enumerate(lines) if line.startswith(f"{method} ["))
    shape = json.loads(lines[place].removeprefix(method))
    numbers = [float(number) for number in lines[place + 1].split()]
    return torch.tensor(numbers, dtype=torch.float64).view(shape)


def compare(run: Path, file: Path, program: Path, patterns: int) -> dict[str, Any]:
    """Return the largest difference of each method, as a share of its largest number, and what the file calls things."""
    trained: Any = load_trained(run)
    data = trained.task.valid_data()
    count = min(patterns, len(data))
    chosen = [place * len(data) // count for place in range(count)]
    x, _ = trained.task.collate(data.__getitems__(chosen))
    scaled = trained.model.normalize_input(x)
    differences, output = {}, ""
    for takes, methods in (
        (scaled, [m for m in METHODS if m in ("forward", "jac")]),
        (x, [m for m in METHODS if m not in ("forward", "jac")]),
    ):
        output = infer(program, file, methods, takes)
        for method in methods:
            here = getattr(trained.model, method)(takes).detach().double()
            there = numbers_of(output, method)
            differences[method] = float((here - there).abs().max() / here.abs().max())
    names = [line for line in output.splitlines() if line.startswith(("input_", "output_", "meta "))]
    return {"patterns": len(x), "differences": differences, "printed": names}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare an exported emulator in C++ with Python.")
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("file", type=Path, help="what samestep export wrote")
    parser.add_argument("program", type=Path, help="infer, built from examples/cpp")
    parser.add_argument("--patterns", type=int, default=100, help="validation patterns to compare")
    parser.add_argument("--json", action="store_true", help="print one object")
    given = parser.parse_args(arguments)
    try:
        found = compare(given.run, given.file, given.program, given.patterns)
        print(json.dumps(found) if given.json else "\n".join(_lines(found)))
        far = {name: value for name, value in found["differences"].items() if value > TOLERANCE}
        if far:
            raise ExportDiffers(f"C++ and Python differ by more than {TOLERANCE:g}: {far}")
    except SamestepError as error:
        print(f"compare_cpp.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _lines(found: dict[str, Any]) -> list[str]:
    shown = [
        f"{name}: C++ and Python differ by {value:.1e} of the largest number"
        for name, value in found["differences"].items()
    ]
    return [*found["printed"], *shown]


if __name__ == "__main__":
    sys.exit(main())
