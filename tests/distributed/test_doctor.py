"""The doctor among real ranks: what all of them report, and what only some of them have."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from samestep import DistributedConfig, create_run_context, detect_hardware
from samestep.check.machine.facts import Machine, Space, inspect_machine
from samestep.check.machine.findings import CheckReport
from samestep.check.machine.machine import GB
from samestep.check.machine.ranks import read_clocks
from samestep.check.machine.run_checks import run_checks
from samestep.config import Config, load_config
from samestep.distributed.probe import SIZES, try_all_reduce
from samestep.environment.variables import process_environment
from tests.ranks import run_ranks
from tests.variations import variations


def _config(**changes: Any) -> Config:
    values = {"global_batch": 32, "lanes": 8, "steps": 5, "distributed.threads_per_rank": 1}
    values |= {"distributed.device": "cpu", "distributed.timeout": 30}
    return load_config({**values, **changes})


def _roomy() -> Machine:
    """This machine, with all that four ranks want: the tests' machine may have less."""
    seen = inspect_machine(process_environment())
    variables = {**seen.variables, "OMP_NUM_THREADS": "1"}
    return replace(
        seen,
        cpus=tuple(range(64)),
        cpu_quota=None,
        memory=Space(64 * GB, 64 * GB),
        shared_memory=Space(8 * GB, 8 * GB),
        open_files=(4096, 4096),
        nvidia_devices=0,
        variables=variables,
    )


def _checked(folder: Path) -> tuple[CheckReport, int]:
    shown: list[CheckReport] = []
    result = run_checks(_config(), folder, machine=_roomy(), show=shown.append)
    assert not dist.is_initialized()
    return result, len(shown)


@pytest.mark.parametrize("world", variations([2, 4], kept=[4]))
def test_good_ranks_are_told_so_on_every_rank(world: int, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    answers = run_ranks(_checked, world, folder)
    result = answers[0][0]
    assert [shown for _, shown in answers] == [1] + [0] * (world - 1)
    assert all(theirs == result for theirs, _ in answers)
    wrong = [f for f in result.findings if f.severity != "ok"]
    assert not wrong, wrong
    assert (result.world, result.exit_code, result.alone) == (world, 0, False)
    # A disk's free space is not the same twice.
    everywhere = [f for f in result.findings if f.check != "run folder"]
    assert {f.ranks for f in everywhere} == {tuple(range(world))}
    rows = [f.what for f in result.findings if f.check == "all-reduce"]
    assert [row.split(":")[0] for row in rows] == ["4 KB", "256 KB", "4 MB", "16 MB"]
    assert all("right" in row and "/s per rank" in row for row in rows)
    expected = {"clocks", "shared folder", "same config", "lanes"}
    assert expected <= {f.check for f in result.findings}
    assert not list(tmp_path.iterdir()), "the doctor leaves nothing"


def _rank() -> int:
    return int(os.environ["RANK"])


def _slowly_shown(folder: Path) -> bool:
    def show(result: CheckReport) -> None:
        time.sleep(1)
        (folder / "shown").touch()

    run_checks(_config(), folder, machine=_roomy(), show=show)
    return (folder / "shown").exists()


def test_no_rank_goes_before_rank_0_has_shown_everything(tmp_path: Path) -> None:
    """A launcher ends all ranks when the first one exits with a code."""
    assert run_ranks(_slowly_shown, 2, tmp_path) == [True, True]


def _where_a_port_is_taken(folder: Path) -> CheckReport:
    with socket.socket() as stranger:
        if _rank() == 0:
            stranger.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            stranger.listen()
        (folder / str(_rank())).touch()
        while not (folder / "0").exists():
            time.sleep(0.01)
        return run_checks(_config(**{"distributed.timeout": 3}), folder, machine=_roomy())


def test_a_taken_port_is_reported_by_each_rank_alone(tmp_path: Path) -> None:
    """Rank 0 cannot listen there, and the others find a stranger."""
    results = run_ranks(_where_a_port_is_taken, 2, tmp_path)
    assert [(found.alone, found.exit_code) for found in results] == [(True, 6)] * 2
    first, second = ([f for f in found.findings if f.severity == "error"] for found in results)
    assert [f.check for f in (*first, *second)] == ["process group"] * 2
    assert "in use" in first[0].what
    assert "does not answer" in second[0].what
    assert "MASTER_PORT" in first[0].advice


def _odd_one(folder: Path) -> CheckReport:
    machine = _roomy()
    if _rank() == 1:
        versions = {**machine.versions, "torch": "1.0.0"}
        variables = {**machine.variables, "OMP_NUM_THREADS": "3"}
        machine = replace(machine, versions=versions, variables=variables)
    return run_checks(_config(seed=int(_rank() == 1)), folder, machine=machine)


@pytest.mark.parametrize("world", variations([2, 4], kept=[4]))
def test_one_rank_that_is_different_is_named_by_all(world: int, tmp_path: Path) -> None:
    results = run_ranks(_odd_one, world, tmp_path)
    assert len(set(results)) == 1
    assert results[0].exit_code == 6
    found = {f.check: f for f in results[0].findings if f.check.startswith("same ")}
    assert found["same versions"].severity == "error"
    assert "torch 1.0.0 on rank 1 " in found["same versions"].what
    assert found["same threads"].severity == "warning"
    assert "OMP_NUM_THREADS=3 on rank 1 " in found["same threads"].what
    assert found["same config"].severity == "error"
    assert found["same processors"].severity == "ok"
    omp = [f for f in results[0].findings if f.check == "omp threads"]
    assert [f.ranks for f in omp if f.severity != "ok"] == [(1,)]


def _in_its_own_folder(folders: list[Path]) -> CheckReport:
    return run_checks(_config(), folders[_rank()], machine=_roomy())


@pytest.mark.requirement("000-P4-3")
@pytest.mark.parametrize("world", variations([2, 4], kept=[4]))
def test_a_folder_that_one_rank_does_not_see_is_an_error(world: int, tmp_path: Path) -> None:
    folders = [tmp_path / "shared"] * (world - 1) + [tmp_path / "elsewhere"]
    for folder in set(folders):
        folder.mkdir()
    results = run_ranks(_in_its_own_folder, world, folders)
    assert len(set(results)) == 1
    assert results[0].exit_code == 6
    (finding,) = [f for f in results[0].findings if f.check == "shared folder"]
    assert (finding.severity, finding.ranks) == ("error", (world - 1,))
    assert finding.hosts[0] in finding.what
    assert not [*folders[0].iterdir(), *folders[-1].iterdir()]


def _adding_wrong() -> list[tuple[int, tuple[int, ...]]]:
    with create_run_context(DistributedConfig(timeout=30), detect_hardware()) as context:
        right = dist.all_reduce

        def spoiled(tensor: torch.Tensor) -> None:
            right(tensor)
            tensor[-1] += context.rank == 2 and tensor.numel() > 1024

        dist.all_reduce = spoiled
        found = try_all_reduce(context.collectives, context.device)
    return [(result.size, result.wrong) for result in found]


def test_a_rank_that_adds_wrong_is_named() -> None:
    expected = [(size, (2,) if size > 4096 else ()) for size in SIZES]
    assert run_ranks(_adding_wrong, 3) == [expected] * 3


def _clocks() -> list[list[tuple[float, float]]]:
    with create_run_context(DistributedConfig(timeout=30), detect_hardware()) as context:
        return read_clocks(context, times=3)


def test_all_ranks_hear_the_same_clocks() -> None:
    first, second = run_ranks(_clocks, 2)
    assert first == second
    assert [len(clocks) for clocks in first] == [2, 2, 2]


def _one_missing(folder: Path) -> tuple[CheckReport, int]:
    os.environ.update(WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")  # a third rank that nobody starts
    shown: list[CheckReport] = []
    fallback = {"distributed.timeout": 3, "distributed.on_init_failure": "fallback"}
    return run_checks(_config(**fallback), folder, machine=_roomy(), show=shown.append), len(shown)


def test_without_a_group_every_rank_tells_what_it_found_itself(tmp_path: Path) -> None:
    for rank, (result, shown) in enumerate(run_ranks(_one_missing, 2, tmp_path)):
        assert (result.rank, result.world, result.alone) == (rank, 3, True)
        assert (result.exit_code, shown) == (6, 1)
        (finding,) = [f for f in result.findings if f.severity == "error"]
        assert finding.check == "process group"
        assert "arrive" in finding.what
        assert {"/dev/shm", "cpus", "lanes"} <= {f.check for f in result.findings}


def _one_fails(folder: Path) -> CheckReport | None:
    if _rank() == 0:
        return run_checks(_config(), folder, machine=_roomy())
    with (
        pytest.raises(RuntimeError, match="out of luck"),
        create_run_context(DistributedConfig(timeout=30), detect_hardware()),
    ):
        raise RuntimeError("out of luck")
    return None


def test_a_rank_that_fails_is_a_finding_on_the_others(tmp_path: Path) -> None:
    kept, gone = run_ranks(_one_fails, 2, tmp_path)
    assert gone is None
    assert (kept.alone, kept.exit_code) == (True, 6)
    (finding,) = [f for f in kept.findings if f.severity == "error"]
    assert finding.what.startswith("it was opened, but then: ")
    assert "rank 1" in finding.what
    assert "Python stack" not in finding.what
