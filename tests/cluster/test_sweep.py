"""Sweeps whose trials run elsewhere: the study of one machine, to the bit, whatever is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from samestep.launch.run.slurm import jobs_of
from tests.cli.processes import samestep
from tests.cli.tiny_sweep import write_sweep
from tests.cluster import runs
from tests.cluster.hosts import Hosts
from tests.cluster.runs import PATIENCE, ROOT, wait_for
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import Sshd
from tests.cluster.test_launching import by_rsh

GRID = {
    "space": {"params.fail": {"choice": ["", "raise"]}, "params.lr": {"choice": [0.05, 0.3]}},
    "sampler": "grid",
    "trials": 4,
    "name": "tiny",
    "directory": "study",
}
"""Four trials, of which the last two raise."""


def written(folder: Path, **values: Any) -> Path:
    """A sweep of one grid; its ranks on hosts are forked by the servers there."""
    path = write_sweep(folder, **{**GRID, **values})
    base = folder / "base.yaml"
    base.write_text(f"{base.read_text()}launch: {{python: '{runs.interpreter[0]}'}}\n")
    return path


def command(*words: str | Path) -> list[str]:
    return [str(runs.interpreter[0]), "-m", "samestep", "sweep", *map(str, words)]


def environment(hosts: Hosts) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **by_rsh(hosts)}


def trials(folder: Path) -> list[dict[str, Any]]:
    done = samestep("show", "study", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["trials"]
    return found


@pytest.fixture(scope="module")
def alone(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The study of one machine, with one rank for each trial."""
    folder = tmp_path_factory.mktemp("alone")
    done = samestep("sweep", "run", written(folder), cwd=folder)
    assert done.returncode == 0, done.stderr
    found = trials(folder)
    assert [trial["state"] for trial in found].count("complete") == 2
    return found


def same_study(found: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    keys = ("number", "state", "value", "params", "folds")
    return [[trial[key] for key in keys] for trial in found] == [[trial[key] for key in keys] for trial in other]


@contextmanager
def sweeping(slurm: Slurm, folder: Path, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep's process on ctl, which sees the processes of the whole machine."""
    with (folder / "output.txt").open("a") as output:
        process = slurm.hosts.start(
            "ctl", command(*words), env={**environment(slurm.hosts), **slurm.env}, cwd=folder,
            light=True, stdout=output, stderr=output,
        )  # fmt: skip
        yield process
    process.wait(PATIENCE)


def queue(slurm: Slurm) -> list[str]:
    """The jobs that have not ended, with their states."""
    return slurm.run(["squeue", "--noheader", "--format=%i %T %j"]).stdout.splitlines()


def jobs(folder: Path) -> dict[str, list[str]]:
    """The jobs that each run has had."""
    found = sorted((folder / "study" / "trials").iterdir())
    return {run.name: [job.job for job in jobs_of(run)] for run in found}


def kill_with_children(process: subprocess.Popen[str]) -> None:
    """All at once, so that none of them can end what it has started."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.suspend()
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()


@pytest.mark.variation(
    "test_steps_of_an_allocation_side_by_side, and of deaths test_a_killed_sweep_comes_to_the_same_study_at_another_parallelism"
)
def test_jobs_on_two_nodes_side_by_side_survive_every_death_of_the_sweep(
    slurm: Slurm, tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    go = tmp_path / "go"
    path = written(tmp_path, parallel=2, ranks_per_trial=2, nodes_per_trial=2)
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + f"params: {{wait: '{go}'}}\n")

    def both_run() -> bool:
        return sum("RUNNING tiny-trial-" in line for line in queue(slurm)) == 2

    with sweeping(slurm, tmp_path, "run", path, "--via", "slurm") as process:
        wait_for(both_run)
        nodes = slurm.run(["squeue", "--noheader", "--format=%N"]).stdout.split()
        assert nodes == ["n[1-2]"] * 2
        kill_with_children(process)
    assert both_run(), "nobody was left to cancel the jobs"
    first = jobs(tmp_path)
    assert [len(ids) for ids in first.values()] == [1, 1]

    with sweeping(slurm, tmp_path, "run", "study") as process:
        logs = [tmp_path / "study" / "logs" / f"{name}.txt" for name in first]
        wait_for(lambda: all("is there already" in log.read_text() for log in logs))
        assert jobs(tmp_path) == first, "they are followed, and not submitted again"
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not queue(slurm))

    output = tmp_path / "output.txt"
    with sweeping(slurm, tmp_path, "run", "study", "retries=1") as process:
        wait_for(both_run)
        [cancelled] = jobs(tmp_path)["trial-0000"][1:]
        slurm.run(["scancel", cancelled])
        named = f"trial 0000 failed and is resumed: .*job {cancelled} ended as CANCELLED"
        wait_for(lambda: re.search(named, output.read_text()) is not None)
        go.touch()
        assert process.wait(PATIENCE) == 0, output.read_text()
    found = trials(tmp_path)
    assert same_study(found, alone)
    reasons = [trial["reason"] for trial in found if trial["state"] == "failed"]
    assert reasons == ["RuntimeError: I was told to"] * 2
    # Of the first two with the second process, again with the third; one of them was cancelled, and
    # each that raises was tried twice.
    assert [len(ids) for ids in jobs(tmp_path).values()] == [3, 2, 2, 2]


@pytest.mark.variation("test_each_trial_has_a_host_of_its_own_over_ssh, by mpirun")
@pytest.mark.needs("mpirun")
def test_mpirun_on_two_hosts(hosts: Hosts, tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    path = written(tmp_path, ranks_per_trial=2, trials=1)
    done = hosts.run(
        "ctl", command("run", path, "--via", "mpirun", "--hosts", "n1:1,n2:1"),
        env=environment(hosts), cwd=tmp_path, light=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert same_study(trials(tmp_path), alone[:1])
    log = next((tmp_path / "study" / "logs").glob("*0000.txt")).read_text()
    assert "2 processes on 2 machines" in log


def test_each_trial_has_a_host_of_its_own_over_ssh(sshd: Sshd, tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    path = written(tmp_path, trials=2, parallel=2)
    base = tmp_path / "base.yaml"
    # Over ssh no variable travels but those that the config names.
    variables = json.dumps({"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})
    launch = f"launch: {{ssh: 'ssh -F {sshd.config}', environment: {variables}, "
    base.write_text(base.read_text().replace("launch: {", launch))
    done = sshd.hosts.run(
        "ctl", command("run", path, "--via", "ssh", "--hosts", "n1:1,n2:1"),
        env=environment(sshd.hosts), cwd=tmp_path, light=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert same_study(trials(tmp_path), alone[:2])
    for number, host in enumerate(("n1", "n2")):
        log = (tmp_path / "study" / "logs" / f"trial-{number:04d}.txt").read_text()
        assert f"[{host}] " in log


def test_steps_of_an_allocation_side_by_side(slurm: Slurm, tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    go, path = tmp_path / "go", written(tmp_path, parallel=2, ranks_per_trial=2, nodes_per_trial=2)
    base = tmp_path / "base.yaml"
    base.write_text(base.read_text() + f"params: {{wait: '{go}'}}\n")
    variables = " ".join(f"{k}={v}" for k, v in environment(slurm.hosts).items())
    line = " ".join(command("run", path, "--via", "srun"))
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nexec env {variables} {line}\n")
    job = slurm.submit(tmp_path / "job.sh", "-N2", "--ntasks-per-node=2")

    def steps() -> list[str]:
        listed = slurm.run(["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i %N"])
        return [text for text in listed.stdout.splitlines() if text.endswith("n[1-2]")]

    wait_for(lambda: len(steps()) == 2)
    go.touch()
    assert slurm.wait(job) == "COMPLETED", (tmp_path / f"slurm-{job}.out").read_text()
    assert same_study(trials(tmp_path), alone)
