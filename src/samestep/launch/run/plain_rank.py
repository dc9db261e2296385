"""A rank of a script that opens no run: `python -m samestep.launch.run.plain_rank [-m] SCRIPT ...`.

The script finds what `python SCRIPT ...` would show it, and the launcher's variables. How it ends
is reported to the launcher, so that the first failing rank's traceback can be shown first. Imports
no torch before the script does: some scripts set variables that torch reads when it is imported.
"""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from samestep.distributed.signals import end_with_parent
from samestep.environment.launch import detect_launch
from samestep.environment.variables import launcher_process, process_environment

_RUNNERS = (__file__, runpy.run_path.__code__.co_filename)

_SCRIPT: dict[str, Any] = {}
"""The script's globals, kept until the interpreter ends, as Python keeps those of a script.

Freed at once, a DistributedDataParallel among them would free its gloo group, which waits with the interpreter lock for
a thread that needs that lock to forget the last collective.
"""


def main(words: Sequence[str]) -> None:
    end_with_parent(signal.SIGTERM, launcher_process(process_environment()))
    try:
        _run(words)
    except Exception as error:
        from samestep.distributed.health.failure_report import report_failure

        report_failure(error.with_traceback(_of_script(error.__traceback__)))
        sys.exit(1)
    except SystemExit as end:
        if end.code in (None, 0):
            _end(words)
        raise
    _end(words)


def _run(words: Sequence[str]) -> None:
    # Which was not on the path: see `interpreter_words`.
    own = Path.cwd() if words[0] == "-m" else Path(words[0]).resolve().parent
    sys.path.insert(0, str(own))
    if words[0] == "-m":
        sys.argv = list(words[1:])  # runpy replaces the first word by the module's file
        _SCRIPT.update(runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    else:
        sys.argv = list(words)
        _SCRIPT.update(runpy.run_path(words[0], run_name="__main__"))


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without what runs the script; all of it if there is nothing else."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename in _RUNNERS:
        found = found.tb_next
    return found or trace


def _end(words: Sequence[str]) -> None:
    from samestep.distributed.health.failure_report import report_end

    place = detect_launch(process_environment())
    ours = tuple(words[:2]) == ("-m", "samestep")  # as doctor, whose group is on a store of its own
    if place.rank == 0 and place.world > 1 and not ours and not _opened_group():
        print(
            f"samestep: warning: the script ran {place.world} times, and opened no process group: "
            "each process trained by itself, on all samples. Open one (init_process_group, "
            "samestep.start), or launch it with --nproc 1",
            file=sys.stderr,
        )
    report_end()


def _opened_group() -> bool:
    """Return whether the script has opened a process group, also one that it has closed since."""
    groups = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is None:
        return "torch" not in sys.modules
    # Set with the first group, and never taken back; torch has no public name for it.
    return getattr(groups, "_default_pg_init_method", "") is not None


if __name__ == "__main__":
    main(sys.argv[1:])
