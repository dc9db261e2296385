"""Measures what 16 bits gain: pictures a second of DistributedAMPTrainer in fp32, tf32, bf16 and fp16, interleaved.

python recipes/vision_language/throughput.py throughput.json

The model is larger than the recipe's by default: a GPU has nothing to gain on a small one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from networks import Captioner
from task import get_batch
from train import CaptionTrainer

from samestep.amp import AMPConfig
from samestep.errors import SamestepError, UserError

KINDS = ("fp32", "tf32", "bf16", "fp16")


def make_trainer(kind: str, given: argparse.Namespace) -> CaptionTrainer:
    torch.manual_seed(0)
    model = Captioner(given.dim, given.heads, given.layers, given.layers)
    return CaptionTrainer(model, AMPConfig(precision=kind, gradient_clip_max_norm=1.0), learning_rate=1e-4)


def seconds_of(trainer: CaptionTrainer, batch: Any, steps: int) -> float:
    """Of so many steps; `training_step` returns a float, so each has ended when it returns."""
    started = time.perf_counter()
    for _ in range(steps):
        trainer.training_step(batch)
    return time.perf_counter() - started


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return the precisions interleaved, so that what changes on the machine changes for all of them."""
    # One process, whatever GPUs there are.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # samestep: ok[first-gpu]
    # On the device already: a copy from the host would be measured, too.
    batch = [part.to(device) for part in get_batch(torch.Generator().manual_seed(0), given.batch)]
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(given.turns):
        for kind in KINDS:
            with make_trainer(kind, given) as trainer:
                seconds_of(trainer, batch, 3)  # the first ones load kernels
                spent = seconds_of(trainer, batch, given.steps)
                skipped = trainer.get_gradient_summary()["skipped_steps"]
            rates[kind].append(given.batch * given.steps / spent)
            print(f"turn {turn + 1}, {kind}: {rates[kind][-1]:,.0f} pictures/s, {skipped} skipped", flush=True)
    middle = {kind: statistics.median(found) for kind, found in rates.items()}
    parameters = sum(p.numel() for p in Captioner(given.dim, given.heads, given.layers, given.layers).parameters())
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": parameters,
        "sizes": {name: getattr(given, name) for name in ("dim", "heads", "layers", "batch", "steps")},
        "pictures_per_second": rates,
        "median": middle,
        "against_fp32": {kind: value / middle["fp32"] for kind, value in middle.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare precisions by their pictures a second.")
    parser.add_argument("output", type=Path, help="the JSON file to write")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8, help="of the vision and of the text part")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20, help="that are timed in a turn")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args(arguments)
    try:
        if min(given.batch, given.steps, given.turns) < 1:
            raise UserError("--batch, --steps and --turns must be at least 1")
        found = measure(given)
    except SamestepError as error:
        print(f"throughput.py: {error}", file=sys.stderr)
        return error.exit_code
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found["against_fp32"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
