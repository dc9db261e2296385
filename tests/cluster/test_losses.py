"""Elastic launches on hosts that lose their power or their network: the run continues without them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from samestep.train.record import RunRecord
from tests.cluster.hosts import Hosts
from tests.cluster.runs import PATIENCE, Training, is_same, wait_for


@pytest.mark.variation("test_a_node_is_lost_and_comes_back, on hosts of their own")
@pytest.mark.parametrize("lose", ["power", "cable"])
def test_a_lost_machine_is_left_out_and_the_run_is_the_same(
    hosts: Hosts, tmp_path: Path, untouched: RunRecord, lose: str
) -> None:
    training = Training.slow(tmp_path, distributed={"timeout": 120.0, "lost_after": 6.0}, checkpoint={"every_steps": 1})
    argv = training.launch("run", "--nproc", "1", "--nodes", "1:2", "--rendezvous", "n1:29400", "--max-restarts", "3")
    log = tmp_path / "n1.log"
    with log.open("w") as file:
        agents = [
            hosts.start(
                host, argv, env=training.by_hand, cwd=tmp_path,
                stdout=file if host == "n1" else subprocess.DEVNULL, stderr=subprocess.STDOUT,
            )
            for host in ("n1", "n2")
        ]  # fmt: skip
        wait_for(lambda: training.steps_of("run") >= 2)
        lost = time.monotonic()
        hosts.power_off("n2") if lose == "power" else hosts.plug("n2", False)
        took = wait_for(lambda: "now 1" in log.read_text())
        training.hurry()
        assert agents[0].wait(PATIENCE) == 0, log.read_text()
    print(f"{lose}: continued after {took:.1f} s, ended after {time.monotonic() - lost:.1f} s")
    assert training.record("run").world == 1
    assert training.record("run").start > 0
    assert is_same(training.record("run"), untouched)
