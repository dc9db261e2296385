"""Compares two runs to the bit: what they logged, what they measured, and the weights of their last checkpoints.

python recipes/decomposition/compare.py runs/language runs/language-two
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.format import read_model
from samestep.checkpoint.listing import select_checkpoint
from samestep.errors import CheckpointError, SamestepError

_TIMES = ("seconds",)
"""What a row of results has of the machine; throughput and memory have rows of their own."""


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return what a run has logged."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}: is {run} a run?") from None
    return [json.loads(line) for line in lines]


def differences(first: Path, second: Path) -> Iterator[str]:
    """Yield what is not the same in two runs, in words."""
    mine, theirs = (
        [_results(row) for row in rows_of(run) if "loss" in row or "val_loss" in row] for run in (first, second)
    )
    if len(mine) != len(theirs):
        yield f"{len(mine)} rows of metrics.jsonl, and {len(theirs)}"
    for one, other in zip(mine, theirs, strict=False):
        if names := [name for name in {**one, **other} if one.get(name) != other.get(name)]:
            name = names[0]
            yield f"step {one['step']}: {name} is {one.get(name)}, and {other.get(name)}"
            break
    yield from _different_weights(*(read_model(select_checkpoint(run, "last").folder) for run in (first, second)))


def _results(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _TIMES}


def _different_weights(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[str]:
    if mine.keys() != theirs.keys():
        yield "the checkpoints hold other tensors"
        return
    for name, tensor in mine.items():
        if not torch.equal(tensor, theirs[name]):
            most = (tensor.double() - theirs[name].double()).abs().max()
            yield f"{name} differs by up to {float(most):g}"
            return


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare runs with the first one, to the bit.")
    parser.add_argument("first", type=Path)
    parser.add_argument("others", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    same = True
    try:
        for other in given.others:
            found = list(differences(given.first, other))
            same = same and not found
            print(f"{other}: {'; '.join(found) if found else f'identical to {given.first}'}")
    except SamestepError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
