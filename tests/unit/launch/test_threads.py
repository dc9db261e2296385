"""Threads and ranks where nobody set them: the same bits on any machine, all its CPUs at work."""

from __future__ import annotations

from typing import Any

import pytest

from samestep.config import Config, load_config
from samestep.environment.fact import Fact
from samestep.environment.launch import requested_threads
from samestep.launch.commands import torchrun
from samestep.launch.commands.summary import more_processes_may_help
from samestep.launch.commands.torchrun import default_nproc


def config(*overrides: str) -> Config:
    values: dict[str, Any] = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}
    return load_config(values, overrides)


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "4"}, 4),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, None),
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, 2),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
    ],
)
def test_threads_are_requested_by_whoever_set_the_variable(environ: dict[str, str], threads: int | None) -> None:
    found = requested_threads(environ)
    assert (None if found is None else found.value) == threads


@pytest.mark.parametrize(("threads", "cpus", "lanes", "ranks"), [(1, 2, 8, 2), (1, 64, 8, 8), (2, 6, 8, 3)])
def test_with_same_bits_other_cpus_are_used_by_a_launch(threads: int, cpus: int, lanes: int, ranks: int) -> None:
    loaded = config(f"lanes={lanes}", f"global_batch={lanes}")
    hint = more_processes_may_help(loaded, 1, threads, cpus, on_gpu=False)
    assert "samestep launch in place of train" in hint
    assert f"as {ranks} ranks, with the same bits" in hint
    assert more_processes_may_help(loaded, 1, threads, threads, on_gpu=False) == ""


@pytest.mark.requirement("001-T-1", "001-G-3")
@pytest.mark.parametrize(
    ("cpus", "omp", "overrides", "ranks"),
    [
        (2, None, [], 2),
        (64, None, [], 8),
        (8, "3", [], 2),
        (8, None, ["distributed.threads_per_rank=4"], 2),
        (8, None, ["same=rounding"], 1),
        (8, None, ["global_batch=null", "batch_per_rank=4"], 1),
        (8, None, ["distributed.world_size=3"], 3),
        (8, None, ["distributed.enabled=false"], 1),
        (8, None, ["distributed.lane_weights=[3,1]"], 2),
    ],
)
def test_a_launch_without_nproc_uses_the_cpus_that_lanes_can_use(
    cpus: int, omp: str | None, overrides: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setattr(torchrun, "expects_gpu", lambda environ: False)
    monkeypatch.setattr(torchrun, "owned_cpus", lambda environ: Fact(cpus, "as a test has it"))
    loaded = config("distributed.threads_per_rank=auto", *overrides)
    assert default_nproc(loaded, device_count=0) == ranks
    assert default_nproc(config(), device_count=0, nodes=4) == min(2, cpus if omp is None else 2)
    for gpus in (1, 4):
        assert default_nproc(config("distributed.device=auto"), device_count=gpus) == gpus
