"""What real launchers set for their ranks, and what is detected from it."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.runs import ROOT, by_rsh
from tests.cluster.slurm import Slurm

WHOAMI = [sys.executable, str(Path(__file__).with_name("whoami.py"))]
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
TWO_BY_TWO = [
    {"rank": 0, "local_rank": 0, "node_rank": 0, "host": "n1"},
    {"rank": 1, "local_rank": 1, "node_rank": 0, "host": "n1"},
    {"rank": 2, "local_rank": 0, "node_rank": 1, "host": "n2"},
    {"rank": 3, "local_rank": 1, "node_rank": 1, "host": "n2"},
]

Facts = dict[str, Any]


def facts_in(text: str) -> list[Facts]:
    found = [json.loads(line) for line in re.findall(r"\{[^{}]*\}", text)]  # mpirun joins lines
    return sorted(found, key=lambda facts: facts["rank"])


def places(facts: list[Facts]) -> list[Facts]:
    return [{key: one[key] for key in TWO_BY_TWO[0]} for one in facts]


def shared(facts: list[Facts], *keys: str) -> Facts:
    """What all ranks have in common."""
    for key in keys:
        assert len({one[key] for one in facts}) == 1, (key, facts)
    return {key: facts[0][key] for key in keys}


def under_srun(slurm: Slurm, *options: str) -> list[Facts]:
    done = slurm.run(["srun", *options, *WHOAMI], env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return facts_in(done.stdout)


def test_srun(slurm: Slurm) -> None:
    found = under_srun(slurm, "-N2", "--ntasks-per-node=2", "--cpus-per-task=2")
    assert places(found) == TWO_BY_TWO
    facts = shared(found, "launcher", "world", "local_world", "nodes", "master", "cpus", "port")
    assert facts.pop("port") is not None
    assert facts == {"launcher": "slurm", "world": 4, "local_world": 2, "nodes": 2, "master": "n1", "cpus": 2}
    assert all(one["cpus_here"] == min(4, len(os.sched_getaffinity(0))) for one in found)


@pytest.mark.parametrize("plugin", ["pmi2", "pmix"])
def test_srun_by_a_plugin_for_mpi(slurm: Slurm, plugin: str) -> None:
    found = under_srun(slurm, f"--mpi={plugin}", "-N2", "--ntasks-per-node=2")
    assert places(found) == TWO_BY_TWO
    assert shared(found, "world", "master", "port")["master"] == "n1"


def test_srun_with_a_different_number_of_ranks_on_each_node(slurm: Slurm, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(["n1", "n1", "n2", "n2", "n3", "n3", "n4"]) + "\n")
    done = slurm.run(
        ["srun", "-n7", "-N4", "--distribution=arbitrary", *WHOAMI], env={**ENVIRONMENT, "SLURM_HOSTFILE": str(hosts)}
    )
    found = facts_in(done.stdout)
    assert [(one["host"], one["local_rank"], one["local_world"]) for one in found] == [
        ("n1", 0, 2), ("n1", 1, 2), ("n2", 0, 2), ("n2", 1, 2), ("n3", 0, 2), ("n3", 1, 2),
        ("n4", 0, 1),
    ]  # fmt: skip
    assert shared(found, "world", "nodes", "master") == {"world": 7, "nodes": 4, "master": "n1"}


def test_two_steps_of_one_job_and_two_jobs_have_ports_of_their_own(slurm: Slurm) -> None:
    first, second = under_srun(slurm, "-N2"), under_srun(slurm, "-N2")
    assert shared(first, "port") != shared(second, "port")
    assert shared(first, "job") != shared(second, "job")


def batch(slurm: Slurm, tmp_path: Path, *lines: str) -> list[Facts]:
    script = tmp_path / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", f"export PYTHONPATH={ENVIRONMENT['PYTHONPATH']}", *lines]) + "\n")
    job = slurm.submit(script, "-N2", "--ntasks-per-node=2", "--output=out.txt")
    assert slurm.wait(job) == "COMPLETED", (tmp_path / "out.txt").read_text()
    return facts_in((tmp_path / "out.txt").read_text())


def test_a_batch_script_without_srun_is_one_process(slurm: Slurm, tmp_path: Path) -> None:
    [alone] = batch(slurm, tmp_path, " ".join(WHOAMI))
    assert (alone["launcher"], alone["rank"], alone["world"]) == ("none", 0, 1)


def test_a_shell_of_salloc_is_one_process(slurm: Slurm) -> None:
    done = slurm.run(["salloc", "-N2", *WHOAMI], env=ENVIRONMENT)
    [alone] = facts_in(done.stdout)
    assert (alone["launcher"], alone["world"]) == ("none", 1)


@pytest.mark.requirement("004-3.1-4")
@pytest.mark.needs("mpirun")
def test_openmpi_inside_a_batch_script(slurm: Slurm, tmp_path: Path) -> None:
    # Every rank sees SLURM_PROCID=0 there, and those of other nodes a step of mpirun's own.
    mpirun = "mpirun --allow-run-as-root --bind-to none -x PYTHONPATH"
    found = batch(slurm, tmp_path, f"{mpirun} {' '.join(WHOAMI)}")
    assert places(found) == TWO_BY_TWO
    facts = shared(found, "launcher", "world", "master", "port")
    assert (facts["launcher"], facts["world"], facts["master"]) == ("openmpi", 4, "n1")


def test_the_variables_of_torchrun_win_inside_a_step(slurm: Slurm) -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    done = slurm.run(["srun", "-N1", *WHOAMI], env={**ENVIRONMENT, **torchrun})
    [found] = facts_in(done.stdout)
    assert (found["launcher"], found["rank"], found["world"]) == ("environment", 5, 8)


@pytest.mark.requirement("004-1.1-1", "004-AO-1")
@pytest.mark.parametrize(
    ("launcher", "argv"),
    [
        ("openmpi", ["mpirun", "--allow-run-as-root", "-np", "4", "--host", "n1:2,n2:2",
                     "--bind-to", "none", "-x", "PYTHONPATH", "-x", "MASTER_ADDR"]),
        ("mpich", ["mpiexec.hydra", "-n", "4", "-hosts", "n1:2,n2:2", "-launcher", "rsh",
                   "-launcher-exec", "{rsh}", "-iface", "eth0"]),
    ],
)  # fmt: skip
@pytest.mark.needs("mpirun", "mpiexec.hydra")
def test_mpi_over_two_hosts(hosts: Hosts, launcher: str, argv: list[str]) -> None:
    argv = [word.replace("{rsh}", str(hosts.rsh)) for word in argv]
    environment = {**ENVIRONMENT, **by_rsh(hosts), "MASTER_ADDR": "n1"}
    done = hosts.run("ctl", [*argv, *WHOAMI], env=environment, light=True)
    assert done.returncode == 0, done.stderr
    found = facts_in(done.stdout)
    assert places(found) == TWO_BY_TWO
    facts = shared(found, "launcher", "world", "local_world", "nodes", "master", "port")
    assert facts.pop("port") is None or launcher == "openmpi"
    assert facts == {"launcher": launcher, "world": 4, "local_world": 2, "nodes": 2, "master": "n1"}


def test_tasks_of_an_array_have_ports_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\nexport PYTHONPATH={ENVIRONMENT['PYTHONPATH']}\nsrun {' '.join(WHOAMI)}\n")
    job = slurm.submit(script, "--array=0-1", "--ntasks=2", "--output=%a.txt")
    ports = set()
    for task in ("0", "1"):
        assert slurm.wait(f"{job}_{task}") == "COMPLETED"
        ports.add(shared(facts_in((tmp_path / f"{task}.txt").read_text()), "port")["port"])
    assert len(ports) == 2
