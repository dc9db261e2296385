"""The short form of `make chaos` and `make launches`."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos
from tests.chaos.disk import SmallDisk
from tests.chaos.family import LeftBehind, adopting_orphans, listening, members, nothing_left
from tests.chaos.faults import KINDS
from tests.chaos.launches import Launches


@pytest.mark.variation(
    "test_a_run_goes_on_at_other_sizes_with_the_same_bits, test_a_lost_rank_ends_all_and_the_run_goes_on and test_a_disk_that_takes_nothing_is_one_clear_error, at random"
)
def test_one_fault_of_each_kind_at_random_instants_and_sizes(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, kills=len(KINDS), seed=3)
    chaos.play()
    assert set(chaos.counts) == set(KINDS)
    assert chaos.summary(0.0)["kills"] >= len(KINDS)


def test_launches_in_a_row_and_at_once(tmp_path: Path) -> None:
    launches = Launches(tmp_path, cold="")
    launches.play(in_a_row=1, at_once=2, rounds=1)
    assert launches.summary()["launches"] == 3


# -- what finds leftovers -------------------------------------------------------------------------

_LEAVES = """
import os, socket, sys, time
if os.fork() == 0:
    os.setsid()
    os.environ.clear()
    server = socket.create_server(("127.0.0.1", 0))
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_process_that_outlives_its_parent_in_its_own_session_is_found() -> None:
    with adopting_orphans():
        watched = ExitStack()
        watched.enter_context(nothing_left("a test", 0.2))
        argv = [sys.executable, "-c", _LEAVES]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            orphan = int(parent.stdout.readline())
        assert orphan in members()
        assert len(listening({orphan})) == 1
        with pytest.raises(LeftBehind, match="a test left processes"):
            watched.close()
        os.waitpid(orphan, 0)
        assert orphan not in members()


def test_a_disk_is_full_to_the_last_byte_and_has_room_again(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk")
    try:
        if not disk.is_mounted:
            pytest.skip("only root mounts a disk")
        disk.fill(members())
        with pytest.raises(OSError, match=disk.words):
            (disk.folder / "file").write_bytes(b"x")
        disk.free()
        (disk.folder / "file").write_bytes(b"x")
    finally:
        disk.close()
