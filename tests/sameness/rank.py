"""One rank of one run of the matrix: trains, and answers how it ended.

    python -m torch.distributed.run --nproc-per-node 2 tests/sameness/rank.py JOB.json

Forked ranks call `train_rank` themselves.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """What the ranks of one run do."""

    config: dict[str, Any]
    folder: str
    """For the record, and for what the ranks print."""
    loop: str = ""
    """`module:function` of an own loop; "" for a task."""
    stop_after: int | None = None


@dataclass(frozen=True)
class Ending:
    """How a rank ended."""

    end: str
    """done, stopped, refused (by samestep, with a reason) or failed."""
    text: str = ""
    by_samestep: bool = False
    """Whether it failed by one of our own errors, such as the news that another rank did."""


def train_rank(job: Job) -> Ending:
    """Train as a rank of whatever started this process."""
    from samestep.errors import SamestepError, Stopped, UserError

    _print_to(Path(job.folder))
    try:
        _train(job)
    except Stopped:
        return Ending("stopped")
    except UserError as error:
        return Ending("refused", str(error))
    except Exception as error:
        return Ending("failed", traceback.format_exc(), isinstance(error, SamestepError))
    return Ending("done")


def _train(job: Job) -> None:
    from samestep.config import load_config
    from samestep.distributed.context import create_run_context
    from samestep.distributed.hardware import detect_hardware
    from samestep.train.record import Recorder
    from samestep.train.start import start
    from samestep.train.train_once import train_once

    config, record = load_config(job.config), Path(job.folder) / "record"
    if not job.loop:
        with create_run_context(config, detect_hardware()) as context:
            train_once(config, context, record, job.stop_after)
        return
    module, _, name = job.loop.partition(":")
    loop = getattr(importlib.import_module(f"tests.sameness.models.{module}"), name)
    with start(config) as run:
        if job.stop_after is not None:
            run.pause_after(job.stop_after)
        Recorder(run, record)
        loop(run)


def _print_to(folder: Path) -> None:
    """Into a file, also by libraries that print by themselves: the matrix shows its own progress."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with (folder / "output.txt").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    answer = train_rank(job)
    path = Path(job.folder) / f"answer-{os.environ['RANK']}.json"
    path.write_text(json.dumps(asdict(answer)))


if __name__ == "__main__":
    main()
