"""One config, started by every launcher on separate hosts: always the same run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from samestep.train.record import RunRecord
from tests.cluster.hosts import Hosts
from tests.cluster.runs import PATIENCE, TASKS, Training, by_rsh, is_same, wait_for
from tests.cluster.slurm import Slurm
from tests.variations import variations

CONTRASTIVE = TASKS.with_name("contrastive_tasks.py")


def run_on_ctl(
    hosts: Hosts, training: Training, argv: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**training.environment, **by_rsh(hosts), **(env or {})}
    return hosts.run("ctl", argv, env=environment, cwd=training.folder, light=True, timeout=PATIENCE)


def on_both(hosts: Hosts, training: Training, run: str, *options: str) -> list[tuple[int, str]]:
    """`samestep launch` by hand on n1 and n2; exit code and output of each."""
    agents = [
        hosts.start(
            host, training.launch(run, "--nodes", "2", "--node-rank", str(node), *options),
            env=training.by_hand, cwd=training.folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node, host in enumerate(("n1", "n2"))
    ]  # fmt: skip
    output = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    return [(agent.returncode, text) for agent, text in zip(agents, output, strict=True)]


@pytest.mark.requirement(
    "000-G-2", "000-P4-9", "003-I-3", "004-KR-4", "004-KR-6", "004-SM-5", "004-5.2-3", "004-AO-1", "000-X-1"
)
@pytest.mark.needs("mpirun")
def test_one_machine_mpirun_on_two_hosts_and_slurm_on_two_nodes_are_one_run(
    slurm: Slurm, tmp_path: Path, untouched: RunRecord
) -> None:
    assert verified(slurm, Training.write(tmp_path)) == {untouched.state_hash}


@pytest.mark.variation("test_one_machine_mpirun_on_two_hosts_and_slurm_on_two_nodes_are_one_run, with another loss")
@pytest.mark.needs("mpirun")
def test_a_loss_over_the_global_batch_is_one_run_under_mpirun_and_slurm(slurm: Slurm, tmp_path: Path) -> None:
    training = Training.write(tmp_path, task=f"{CONTRASTIVE}:Shared", epochs=2)
    assert len(verified(slurm, training)) == 1


def verified(slurm: Slurm, training: Training) -> set[str]:
    """What a run ends with on one machine, by mpirun on two hosts and by Slurm on two nodes."""
    argv = training.command(
        "verify", f"run_dir={training.folder / 'v'}", "--worlds", "1,2@mpirun,4@slurm",
        "--nodes", "2", "--hosts", "n1,n2", "--json",
    )  # fmt: skip
    done = run_on_ctl(slurm.hosts, training, argv, slurm.env)
    assert done.returncode == 0, done.stderr
    worlds = json.loads(done.stdout)["worlds"]
    assert set(worlds) == {"1", "2 mpirun", "4 slurm"}
    assert all(world["first_difference"] is None for world in worlds.values())
    return {world["state_hash"] for world in worlds.values()}


@pytest.mark.requirement("000-P4-1", "000-P4-5", "003-T3-8")
def test_machines_numbered_by_hand_whose_names_mean_loopback(
    hosts: Hosts, tmp_path: Path, untouched: RunRecord
) -> None:
    training = Training.write(tmp_path)
    with hosts.alias("n1", "n1", "127.0.1.1"), hosts.alias("n2", "n2", "127.0.1.1"), hosts.second_interface("n2"):
        ended = on_both(hosts, training, "run", "--nproc", "2", "--master-addr", "n1")
    assert [code for code, _ in ended] == [0, 0], ended
    assert "4 processes on 2 machines" in ended[0][1]
    shown = "GLOO_SOCKET_IFNAME=eth0 on {0}: the name {0} resolves to 127.0.1.1, not to 10.77.0.1{1}"
    assert shown.format("n1", 1) in ended[0][1]
    assert shown.format("n2", 2) in ended[1][1]
    assert is_same(training.record("run"), untouched)


def test_a_rank_that_fails_on_another_machine_is_shown_at_the_first_one(hosts: Hosts, tmp_path: Path) -> None:
    training = Training.write(tmp_path, task=f"{TASKS}:Broken")
    (code, output), _ = on_both(hosts, training, "run", "--nproc", "1", "--master-addr", "n1")
    assert code == 1
    assert "rank 1 on n2 failed first: ZeroDivisionError" in output
    assert 'tasks.py", line' in output, "with its traceback"


@pytest.mark.needs("mpirun")
def test_a_rank_that_fails_under_mpirun_is_shown_here(hosts: Hosts, tmp_path: Path) -> None:
    training = Training.write(tmp_path, task=f"{TASKS}:Broken")
    done = run_on_ctl(hosts, training, training.launch("run", "--via", "mpirun", "--hosts", "n1:1,n2:1"))
    assert done.returncode == 1
    assert "samestep: rank 1 on n2 failed:" in done.stderr
    assert 'tasks.py", line' in done.stderr
    assert "ZeroDivisionError: my own bug" in done.stderr


def test_the_doctor_looks_between_the_ranks_of_a_step(slurm: Slurm, tmp_path: Path) -> None:
    training = Training.write(tmp_path)
    argv = ["srun", "-N2", "--ntasks-per-node=1", *training.command("check", "--json")]
    done = slurm.run(argv, env=training.environment, cwd=tmp_path)
    assert done.returncode in (0, 5), done.stderr  # this machine may well deserve a warning
    found = {one["check"]: one for one in json.loads(done.stdout)["findings"]}
    assert "slurm (SLURM_PROCID is set), 2 ranks on 2 machines" in found["launcher"]["what"]
    assert found["shared folder"]["severity"] == "ok"
    assert found["all-reduce"]["severity"] == "ok"


@pytest.mark.variation("test_two_steps_of_one_job_and_two_jobs_have_ports_of_their_own, with whole runs")
def test_two_jobs_at_once_on_the_same_nodes(slurm: Slurm, tmp_path: Path, untouched: RunRecord) -> None:
    training = Training.write(tmp_path)
    jobs = []
    for run in ("one", "two"):
        argv = training.launch(run, "--via", "slurm", "--nodes", "2", "--nproc", "1")
        done = run_on_ctl(slurm.hosts, training, argv, slurm.env)
        assert done.returncode == 0, done.stderr
        jobs += re.findall(r"submitted job (\d+)", done.stderr)
    assert [slurm.wait(job) for job in jobs] == ["COMPLETED"] * 2
    assert slurm.show(jobs[0])["NodeList"] == slurm.show(jobs[1])["NodeList"] == "n[1-2]"
    assert is_same(training.record("one"), untouched)
    assert is_same(training.record("two"), untouched)


def test_a_run_has_one_job_at_a_time_which_can_be_looked_at_and_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    training = Training.write(tmp_path, task=f"{TASKS}:Slow", params={"seconds": 0.1}, epochs=400)
    argv = training.launch("run", "--via", "slurm", "--nproc", "1")
    done = run_on_ctl(slurm.hosts, training, argv, slurm.env)
    [job] = re.findall(r"submitted job (\d+)", done.stderr)
    again = run_on_ctl(slurm.hosts, training, argv, slurm.env)
    assert again.returncode == 2
    assert f"has job {job}, which is" in again.stderr
    slurm.wait(job, "RUNNING")
    wait_for(lambda: training.steps_of("run") > 0)

    def slurm_command(*words: str) -> str:
        argv = [*training.command("x")[:3], *words, str(tmp_path / "run")]
        return run_on_ctl(slurm.hosts, training, argv, slurm.env).stdout

    [state] = json.loads(slurm_command("show", "--json"))["jobs"]
    assert (state["job"], state["state"], state["nodes"]) == (job, "RUNNING", "n1")
    assert "One process on cpu" in slurm_command("show", "--log")
    assert f"job {job} is cancelled; it was RUNNING" in slurm_command("stop")
    assert slurm.wait(job) == "CANCELLED"
    wait_for(lambda: "SIGTERM stopped the run" in slurm_command("show", "--log"))
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")), "it saved before it went"


def test_a_job_that_fails_is_shown_with_host_rank_and_traceback(slurm: Slurm, tmp_path: Path) -> None:
    training = Training.write(tmp_path, task=f"{TASKS}:Broken")
    argv = training.launch("run", "--via", "slurm", "--nodes", "2", "--nproc", "1", "--follow")
    done = run_on_ctl(slurm.hosts, training, argv, slurm.env)
    assert done.returncode == 1
    output = done.stdout
    assert "samestep: rank 1 on n2 failed:" in output
    assert "ZeroDivisionError" in output
    assert "samestep: rank 0" not in output.partition("rank 1 on n2 failed")[0]
    assert "ended as FAILED" in done.stderr


def test_names_with_everything_in_them_reach_the_ranks_by_a_real_sbatch(
    slurm: Slurm, tmp_path: Path, untouched: RunRecord
) -> None:
    folder = tmp_path / 'it\'s a "run" 100% $(touch pwned) ü'
    folder.mkdir()
    training = Training.write(folder)
    argv = training.launch("my run", "--via", "slurm", "--nproc", "1", "--follow",
                           "name=it's $(touch pwned) `touch pwned`")  # fmt: skip
    done = run_on_ctl(slurm.hosts, training, argv, slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_same(training.record("my run"), untouched)
    assert not list(tmp_path.rglob("pwned"))


def start_mpirun(hosts: Hosts, training: Training, flavour: str, stdout: int) -> subprocess.Popen[str]:
    """A launch by OpenMPI from ctl on two hosts, or by MPICH's hydra on n1 alone."""
    options = ["--hosts", "n1,n2"] if flavour == "openmpi" else ["launch.mpirun=mpiexec.hydra"]
    return hosts.start(
        "ctl" if flavour == "openmpi" else "n1",
        training.launch("run", "--via", "mpirun", "--nproc", "2", *options),
        env={**training.environment, **by_rsh(hosts)}, cwd=training.folder,
        light=flavour == "openmpi", stdout=stdout, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.parametrize("flavour", variations(["openmpi", "hydra"], kept=["openmpi"]))
@pytest.mark.needs("mpirun", "mpiexec.hydra")
def test_mpirun_forwards_a_signal_and_the_run_resumes_later(
    hosts: Hosts, tmp_path: Path, untouched: RunRecord, flavour: str
) -> None:
    training = Training.slow(tmp_path)
    process = start_mpirun(hosts, training, flavour, stdout=subprocess.PIPE)
    wait_for(lambda: training.steps_of("run") >= 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    training.hurry()
    assert re.search(r"SIG(USR2|TERM) on rank 0 stopped the run after step", output)
    resumed = start_mpirun(hosts, training, flavour, stdout=subprocess.PIPE)
    output, _ = resumed.communicate(timeout=PATIENCE)
    assert resumed.returncode == 0, output
    assert "Resuming from" in output
    assert is_same(training.record("run"), untouched)


@pytest.mark.parametrize("flavour", variations(["openmpi", "hydra"], kept=["hydra"]))
@pytest.mark.needs("mpirun", "mpiexec.hydra")
def test_an_mpirun_whose_launcher_is_killed_ends_with_all_its_ranks(hosts: Hosts, tmp_path: Path, flavour: str) -> None:
    training = Training.slow(tmp_path)
    process = start_mpirun(hosts, training, flavour, stdout=subprocess.DEVNULL)
    wait_for(lambda: training.steps_of("run") >= 2)
    assert len(_working_in(tmp_path)) > 2, "the launcher, mpirun and its ranks"
    process.kill()
    process.wait()
    wait_for(lambda: not _working_in(tmp_path))


def _working_in(folder: Path) -> list[psutil.Process]:
    """The processes of this machine, and so of all its hosts, that were started in the folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has just ended
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(process)
    return found
