"""Fixtures that fail a test which leaves something behind."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import settings

from tests.installed import missing_commands

# Before anything imports torch: one thread a rank, for libraries that read it only then.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And where a command of a document uses several: on a machine with more processes than CPUs, threads
# that wait by spinning burn the time of those they wait for. 96 steps of the starter: 36 s or 7 s.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The user's key, by which they know their own runs, is not for tests to make.
if "SAMESTEP_TESTS_STATE" not in os.environ:
    os.environ["SAMESTEP_TESTS_STATE"] = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# What a shell or nohup starts in the background ignores these, and so would all our processes.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Runs save and sync files all the time, which takes a tenth of the suite's time where they are on a disk.
_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# The suite tries the same cases every time: new ones are for `make fuzz`, which nobody waits for.
settings.register_profile("suite", derandomize="FUZZ_TIMES" not in os.environ, deadline=None)
settings.load_profile("suite")

# Threads that outlive a test by design: hypothesis' and the standard library's own pools, and the
# watch over progress bars that ONNX's exporter starts.
_LASTING = ("QueueFeederThread", "asyncio_", "pydevd", "tqdm_monitor")


# pytest sets the first; parts of torch set the others when they are first imported.
_SET_BY_OTHERS = (
    "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK",
    "HDF5_PLUGIN_PATH",
)  # fmt: skip

_LONGEST_FIRST = (
    "test_every_command_of_a_document_runs_as_written",
    "recipes", "cli", "export", "distributed", "sameness", "fuzz", "chaos", "unit/distributed", "unit/sweep",
)  # fmt: skip
"""Test functions, and folders."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import everything without collections, and keep it out of those that tests cause: each would take a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # of what `-m` has left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow tests first, so that none of several workers is left with one at the end.

    Those of the cluster wait for Slurm most of the time: one of them comes after every four others, so that the
    workers do not all wait at once.
    """
    tests = Path(__file__).parent

    def is_in(item: pytest.Item, folder: str) -> bool:
        return (tests / folder) in item.path.parents

    def place(item: pytest.Item) -> int:
        function = item.name.partition("[")[0]
        found = (at for at, name in enumerate(_LONGEST_FIRST) if function == name or is_in(item, name))
        return next(found, len(_LONGEST_FIRST))

    waiting = iter([item for item in items if is_in(item, "cluster")])
    busy = sorted((item for item in items if not is_in(item, "cluster")), key=place)
    ordered = []
    for at in range(0, len(busy), 4):
        ordered += [*busy[at : at + 4], *islice(waiting, 1)]
    items[:] = [*ordered, *waiting]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        if reason := missing_commands(*mark.args):
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name not in _SET_BY_OTHERS
    }
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread not in threads and thread.is_alive() and not thread.name.startswith(_LASTING)
    ]
    os.environ.clear()
    os.environ.update(environment)
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"
    assert not left, f"the test left threads running: {left}"
    assert not _open_group(), "the test left a process group open"


def _open_group() -> bool:
    dist = sys.modules.get("torch.distributed")  # who has not imported it has opened none
    if dist is None or not dist.is_initialized():
        return False
    dist.destroy_process_group()
    return True
