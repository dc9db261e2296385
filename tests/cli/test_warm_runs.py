"""Runs of a sweep that are forked with torch imported: the same to the bit, and as hard to lose."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from samestep.words import counted
from tests.cli.processes import children_of, processes_of, samestep, started, wait_for
from tests.cli.tiny_sweep import write_sweep

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux only")

TELLS = """
from samestep.launch.forkserver.forked import FORKED
print("this process was", "started" if FORKED.get() is None else "forked", flush=True)
"""


def write_telling_sweep(folder: Path, **values: object) -> Path:
    """A sweep whose runs print how they came to be."""
    path = write_sweep(folder, **values)
    task = folder / "tiny_sweep_task.py"
    task.write_text(task.read_text() + TELLS)
    return path


def test_a_forked_run_has_the_bits_of_one_that_started_cold(tmp_path: Path) -> None:
    space = {"params.lr": {"choice": [0.1]}, "distributed.threads_per_rank": {"choice": [1, 2]}}
    path = write_telling_sweep(tmp_path, sampler="grid", space=space)
    studies = []
    for name, more in (("warm", ["parallel=2"]), ("cold", ["warm=false", "parallel=1"])):
        done = samestep("sweep", "run", path, f"directory={name}", *more, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        studies.append(json.loads(done.stdout)["trials"])
    warm, cold = studies
    assert warm == cold
    for number, trial in enumerate(warm):
        weights = f"trials/trial-{number:04d}/checkpoints/step-00000006/model.safetensors"
        files = [next(tmp_path.glob(f"{name}/{weights}")) for name in ("warm", "cold")]
        assert files[0].read_bytes() == files[1].read_bytes()
        told = (tmp_path / f"warm/logs/trial-{number:04d}.txt").read_text()
        threads = trial["params"]["distributed.threads_per_rank"]
        assert f"One process on cpu, {counted(threads, 'thread')}" in told
        # Libraries have read another number of threads already: a new interpreter has not.
        assert f"this process was {'forked' if threads == 1 else 'started'}" in told
        assert "was started" in (tmp_path / f"cold/logs/trial-{number:04d}.txt").read_text()


@pytest.mark.variation("test_a_forked_run_has_the_bits_of_one_that_started_cold: on two ranks")
def test_ranks_are_forked_too_and_come_to_the_same_value(tmp_path: Path) -> None:
    path = write_telling_sweep(tmp_path, space={"params.lr": {"choice": [0.1]}}, trials=1)
    values = []
    for ranks in (1, 2):
        more = [f"directory=on-{ranks}", f"ranks_per_trial={ranks}", "--json"]
        done = samestep("sweep", "run", path, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        values.append(json.loads(done.stdout)["trials"][0]["value"])
    assert values[0] == values[1]
    outputs = [tmp_path / "on-2/logs/trial-0000.txt", *tmp_path.glob("on-2/**/rank-1.out")]
    assert len(outputs) == 2
    for output in outputs:
        assert "this process was forked" in output.read_text()


def test_without_the_process_that_forks_a_sweep_goes_on(tmp_path: Path) -> None:
    path = write_telling_sweep(tmp_path, trials=2, parallel=1)
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + f"params: {{wait: {tmp_path / 'go'}}}\n")
    with started("sweep", "run", path, cwd=tmp_path) as process:
        wait_for((tmp_path / "go.waiting").exists)
        (server,) = (pid for pid in children_of(process.pid) if "forks warm" in line_of(pid))
        os.kill(server, signal.SIGKILL)
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    assert "start cold from now on" in output
    told = [(tmp_path / f"sweeps/tiny/logs/trial-000{n}.txt").read_text() for n in (0, 1)]
    assert ["was forked" in text for text in told] == [True, False]


def test_a_forked_run_ends_with_its_sweep_and_the_server_too(tmp_path: Path) -> None:
    path = write_telling_sweep(tmp_path, trials=1, ranks_per_trial=2)
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + f"params: {{wait: {tmp_path / 'go'}}}\n")
    with started("sweep", "run", path, cwd=tmp_path) as process:
        wait_for((tmp_path / "go.waiting").exists)
        family = family_of(process.pid)
        assert sum("forks" in line_of(pid) for pid in family) == 2, "of the sweep, of the launcher"
        assert len(processes_of(base)) == 3, "the launcher and its ranks, by their own lines"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (tmp_path / "go").touch()  # they save first
    wait_for(lambda: not any(line_of(pid) for pid in family))


def family_of(pid: int) -> list[int]:
    return [pid, *(other for child in children_of(pid) for other in family_of(child))]


def line_of(pid: int) -> str:
    """A process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
