"""How long a save blocks the training, compared with a plain synchronous `torch.save`.

    python benchmarks/checkpoint.py [--megabytes 500] [--rounds 7] [--device cpu|cuda]
                                    [--json FILE]

`samestep bench checkpoint`, with the goals of this project: the variants take turns on the same
state and the same disk, and for each the time until training could continue is measured.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from samestep.bench.builtin import builtin_config, width_of_state
from samestep.bench.checkpoint import measure_checkpoint
from samestep.cli.bench.shared import print_document
from samestep.config import override_config
from samestep.distributed.context import create_run_context
from samestep.distributed.hardware import detect_hardware

GOALS = {"cpu": 0.2, "cuda": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = override_config(
        builtin_config(width=width_of_state(arguments.megabytes)), [f"distributed.device={arguments.device}"]
    )
    with tempfile.TemporaryDirectory() as folder, create_run_context(config, detect_hardware()) as context:
        found = measure_checkpoint(config, context, Path(folder), arguments.rounds)
    print_document(found)
    print(f"goal: a pause of at most {GOALS[arguments.device]} times torch.save")
    if arguments.json:
        found.write(arguments.json)


if __name__ == "__main__":
    main()
