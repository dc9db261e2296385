"""The cluster that these tests run on behaves like a real one."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.runs import wait_for
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import Sshd


def _reaches(hosts: Hosts, target: str, seconds: int) -> bool:
    """Whether n1 is answered by a host, which refuses a connection to a port not in use."""
    probe = ["timeout", str(seconds), "bash", "-c", f"exec 3<>/dev/tcp/{target}/9"]
    return "refused" in hosts.run("n1", probe).stderr


def test_hosts_have_their_own_names_addresses_and_process_tables(hosts: Hosts) -> None:
    for host in ("ctl", *hosts.names):
        assert hosts.run(host, ["hostname"]).stdout.strip() == host
        assert f" {hosts.address(host)}/24 " in hosts.run(host, ["ip", "-4", "addr"]).stdout
        assert "::" not in hosts.run(host, ["getent", "hosts", host]).stdout
    sleep = hosts.start("n1", ["sleep", "1234"])
    assert "1234" in hosts.run("n1", ["ps", "ax"]).stdout
    assert "1234" not in hosts.run("n2", ["ps", "ax"]).stdout
    sleep.kill()


def test_hosts_have_their_own_shared_memory(hosts: Hosts) -> None:
    hosts.run("n1", ["touch", "/dev/shm/of-n1"])
    assert hosts.run("n1", ["test", "-e", "/dev/shm/of-n1"]).returncode == 0
    assert hosts.run("n2", ["test", "-e", "/dev/shm/of-n1"]).returncode == 1
    assert not Path("/dev/shm/of-n1").exists()


def test_a_command_gets_its_folder_environment_and_signals(hosts: Hosts, tmp_path: Path) -> None:
    answer = hosts.run("n1", ["sh", "-c", "pwd; echo $WORD"], cwd=tmp_path, env={"WORD": "hey"})
    assert answer.stdout.split() == [str(tmp_path), "hey"]
    for light in (False, True):
        script = "trap 'exit 7' TERM; echo ready; while :; do sleep .01; done"
        process = hosts.start("n1", ["bash", "-c", script], light=light, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 7
        process.stdout.close()


def test_a_command_that_does_not_end_is_killed_and_quoted(hosts: Hosts) -> None:
    with pytest.raises(TimeoutError, match=r"on n1, no end within 2 s: .*\n.*\nbegun"):
        hosts.run("n1", ["sh", "-c", "echo begun; sleep 4321; true"], timeout=2)
    assert "4321" not in hosts.run("n1", ["ps", "ax"]).stdout


def test_a_host_collects_its_orphans(hosts: Hosts) -> None:
    hosts.run("n1", ["sh", "-c", "(sh -c 'sleep .05 & sleep .05 & exit') & exit"])
    wait_for(lambda: " sleep" not in hosts.run("n1", ["ps", "ax"]).stdout)


def test_a_host_powered_off_loses_its_processes_and_boots_afresh(hosts: Hosts) -> None:
    sleep = hosts.start("n2", ["sleep", "1000"])
    hosts.run("n2", ["touch", "/dev/shm/left"])
    hosts.power_off("n2")
    assert sleep.poll() == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="n2 is powered off"):
        hosts.run("n2", ["true"])
    assert hosts.run("ctl", [hosts.rsh, "n2", "true"], light=True).returncode == 255
    assert not _reaches(hosts, "n2", seconds=1)
    hosts.boot("n2")
    assert "sleep" not in hosts.run("n2", ["ps", "ax"]).stdout
    assert "left" not in hosts.run("n2", ["ls", "/dev/shm"]).stdout
    assert _reaches(hosts, "n2", seconds=60)


def test_a_host_unplugged_cannot_be_reached_and_comes_back(hosts: Hosts) -> None:
    assert _reaches(hosts, "n2", seconds=60)
    hosts.plug("n2", False)
    assert not _reaches(hosts, "n2", seconds=1)
    assert hosts.run("n2", ["true"]).returncode == 0
    hosts.plug("n2", True)
    assert _reaches(hosts, "n2", seconds=60)


def test_a_name_can_mean_another_address_on_one_host(hosts: Hosts) -> None:
    ask = ["getent", "ahostsv4", "n1"]
    with hosts.alias("n1", "n1", "127.0.1.1"):
        assert hosts.run("n1", ask).stdout.startswith("127.0.1.1 ")
        assert hosts.run("n1", ask, light=True).stdout.startswith("127.0.1.1 ")
        assert hosts.run("n2", ask).stdout.startswith("10.77.0.11 ")
    assert hosts.run("n1", ask).stdout.startswith("10.77.0.11 ")


def test_a_second_interface_leads_nowhere(hosts: Hosts) -> None:
    with hosts.second_interface("n1") as first, hosts.second_interface("n2") as second:
        shown = hosts.run("n1", ["ip", "-br", "-4", "addr", "show", "eth1", "up"]).stdout.split()
        assert shown[1:] == ["UP", f"{first}/24"]
        assert not _reaches(hosts, second, seconds=1)
        assert _reaches(hosts, "n2", seconds=60)
    assert hosts.run("n1", ["ip", "link", "show", "eth1"]).returncode == 1


def test_a_job_runs_and_is_waited_for(slurm: Slurm, tmp_path: Path) -> None:
    script = _script(tmp_path, "srun sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'")
    job = slurm.submit(script, "--nodes=2", "--gpus-per-node=2", "--job-name=two words")
    assert slurm.wait(job) == "COMPLETED"
    assert slurm.show(job)["JobName"] == "two words"
    output = (tmp_path / f"slurm-{job}.out").read_text().splitlines()
    assert sorted(output) == ["n1 0,1", "n2 0,1"]


def test_a_node_comes_back_after_a_boot(slurm: Slurm) -> None:
    slurm.hosts.power_off("n3")
    slurm.hosts.boot("n3")
    slurm.restart_node("n3")
    assert slurm.run(["srun", "-w", "n3", "hostname"]).stdout == "n3\n"


@pytest.mark.variation("test_a_host_powered_off_loses_its_processes_and_boots_afresh, with daemons")
def test_services_and_hosts_are_repaired(hosts: Hosts, slurm: Slurm, sshd: Sshd) -> None:
    running = hosts.running()
    for host in ("ctl", "n1"):
        hosts.start(host, ["sh", "-c", "sleep 2345; true"])
    hosts.power_off("n2")
    hosts.plug("n3", False)
    slurm.run(["scontrol", "update", "nodename=n4", "state=down", "reason=test"])
    hosts.repair(keep=running)
    for host in ("ctl", "n1"):
        assert "2345" not in hosts.run(host, ["ps", "ax"]).stdout
    assert slurm.run(["srun", "-N4", "true"]).returncode == 0
    assert hosts.run("ctl", ["ssh", "-F", sshd.config, "n1", "true"]).returncode == 0


def test_rsh_carries_over_no_environment(hosts: Hosts) -> None:
    command = [str(hosts.rsh), "10.77.0.12", "hostname;", "echo", "$WORD"]
    answer = hosts.run("ctl", command, light=True, env={"WORD": "hey"})
    assert answer.stdout == "n2\n\n"


@pytest.mark.usefixtures("namespaces")
def test_closed_hosts_leave_nothing() -> None:
    with Hosts(1) as hosts:
        processes = [hosts.start(host, ["sleep", "1000"]) for host in ("ctl", "n1")]
        processes.append(hosts.start("ctl", ["sleep", "1000"], light=True))
        folder = hosts.folder
    assert all(process.returncode is not None for process in processes)
    assert not folder.exists()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert folder.name not in left


@pytest.mark.usefixtures("namespaces")
def test_hosts_that_fail_to_start_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hosts, "address", lambda hosts, host: "10.77.0.1" if host == "ctl" else "?")
    hosts = Hosts(2)
    with pytest.raises(RuntimeError, match="any valid prefix is expected"), hosts:
        pass
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert hosts.folder.name not in left


def _script(folder: Path, *lines: str) -> Path:
    script = folder / "job.sh"
    script.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    return script
