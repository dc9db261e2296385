"""What a launch opens to the network, and what somebody else there can do with it."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from samestep.train.record import RunRecord
from tests.cluster.hosts import Hosts
from tests.cluster.runs import PATIENCE, TASKS, Training, is_same, wait_for
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import Sshd
from tests.cluster.test_launching import by_rsh
from tests.cluster.test_ssh import over_ssh

_LISTENS = "0A"
_ATTACKER = Path(__file__).with_name("attacker.py")


def listening(hosts: Hosts, host: str) -> set[tuple[str, int]]:
    """The addresses and ports at which anything on a host listens, but for its daemons."""
    process, found = hosts.first_process(host), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == _LISTENS:
                address, port = row[1].split(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """From the kernel's hexadecimal: words of four bytes, each in this machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def attack(hosts: Hosts, marker: Path, host: str, ports: Sequence[int]) -> dict[int, str]:
    """What the attacker, on a host of its own, could do at each port."""
    argv = [sys.executable, _ATTACKER, marker, hosts.address(host), *map(str, ports)]
    done = hosts.run("ctl", argv, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    lines = (line.split(" ", 1) for line in done.stdout.splitlines())
    return {int(port): answer for port, answer in lines}


@contextmanager
def running(
    hosts: Hosts, training: Training, commands: dict[str, list[str]], env: dict[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    """Commands on hosts, from when their run has done two steps."""
    agents = [
        hosts.start(host, argv, env=env, cwd=training.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for host, argv in commands.items()
    ]
    try:
        wait_for(lambda: training.steps_of("run") >= 2 or any(a.poll() is not None for a in agents))
        yield agents
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
            agent.communicate()


def test_on_one_machine_nothing_listens_but_to_itself(hosts: Hosts, tmp_path: Path, untouched: RunRecord) -> None:
    training, marker = Training.slow(tmp_path), tmp_path / "pwned"
    before = listening(hosts, "n1")
    command = training.launch("run", "--nproc", "2")
    with running(hosts, training, {"n1": command}, training.environment) as [agent]:
        found = listening(hosts, "n1") - before
        assert len(found) >= 3, "the launcher's store, and gloo's of two ranks"
        assert {address for address, _ in found} == {"127.0.0.1"}
        answers = attack(hosts, marker, "n1", [port for _, port in found])
        training.hurry()
        output, _ = agent.communicate(timeout=PATIENCE)
        assert agent.returncode == 0, output
    assert set(answers.values()) == {"closed: Connection refused"}
    assert not marker.exists()
    assert is_same(training.record("run"), untouched)


def test_machines_listen_to_their_network_only_and_believe_nobody_without_the_secret(
    hosts: Hosts, tmp_path: Path
) -> None:
    training, marker = Training.slow(tmp_path, epochs=400), tmp_path / "pwned"
    before = {host: listening(hosts, host) for host in ("n1", "n2")}
    command = training.launch("run", "--nproc", "1", "--nodes", "1:2", "--rendezvous", "n1:29400")
    with (
        hosts.second_interface("n1"),
        running(hosts, training, dict.fromkeys(("n1", "n2"), command), training.by_hand) as agents,
    ):
        for host in ("n1", "n2"):
            found = listening(hosts, host) - before[host]
            assert {address for address, _ in found} <= {hosts.address(host)}, found
        ports = [port for _, port in listening(hosts, "n1") - before["n1"]]
        answers = attack(hosts, marker, "n1", ports)
        outputs = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
        # The machine that notices it first ends its ranks, and those of the other one save and stop.
        codes = {agent.returncode for agent in agents}
        assert 2 in codes, outputs
        assert codes <= {2, 75}, outputs
    output = "".join(outputs)
    assert answers[29400] == "written to", "torch's store itself takes whatever comes"
    assert "somebody without this launch's secret wrote to the store" in output
    time.sleep(1)
    assert not marker.exists()


@pytest.mark.variation(
    "test_machines_listen_to_their_network_only_and_believe_nobody_without_the_secret, by numbers and not by a rendezvous"
)
def test_a_machine_without_the_secret_is_refused_and_named(hosts: Hosts, tmp_path: Path) -> None:
    training = Training.write(tmp_path, distributed={"timeout": 20.0})

    def command(node: int) -> list[str]:
        return training.launch("run", "--nproc", "1", "--nodes", "2", "--node-rank", str(node), "--master-addr", "n1")

    first = hosts.start(
        "n1", command(0), env=training.by_hand, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    port = 29500
    wait_for(lambda: (hosts.address("n1"), port) in listening(hosts, "n1"))
    attack(hosts, tmp_path / "pwned", "n1", [port])
    other = {**training.by_hand, "SAMESTEP_SECRET": "another one of 32 characters...."}
    second = hosts.run("n2", command(1), env=other, cwd=tmp_path, timeout=PATIENCE)
    assert second.returncode == 2
    assert "not signed with this launch's secret (SAMESTEP_SECRET)" in second.stderr
    without = {name: "" for name in ("SAMESTEP_SECRET",)}
    third = hosts.run("n2", command(1), env={**training.environment, **without}, cwd=tmp_path)
    assert third.returncode == 2
    assert "needs a secret" in third.stderr
    output, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 2
    assert "refused a process that introduced itself as machine 1, host 'evil'" in output
    assert "of 2 machines, 1 did not arrive in time: 1" in output


def shown_by(folder: Path) -> list[str]:
    """The command lines of all processes of the machine, and the files of a run."""
    texts = [p.read_text(errors="replace") for p in folder.rglob("*") if p.is_file()]
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            texts.append(line.read_text(errors="replace"))
    return texts


@pytest.mark.needs("mpirun")
def test_the_secret_is_on_no_command_line_and_in_no_file(slurm: Slurm, sshd: Sshd, tmp_path: Path) -> None:
    hosts = slurm.hosts
    launches = {
        "ssh": lambda training: over_ssh(training, sshd),
        "mpirun": lambda training: training.launch("run", "--via", "mpirun", "--hosts", "n1:1,n2:1"),
        "slurm": lambda training: training.launch("run", "--via", "slurm", "--nodes", "2", "--nproc", "1", "--follow"),
    }
    for name, launch in launches.items():
        folder = tmp_path / name
        folder.mkdir()
        confided = tmp_path / f"secret of {name}"
        params = {"seconds": 0.3, "hurry": str(folder / "hurry"), "confide": str(confided)}
        training = Training.write(folder, task=f"{TASKS}:Confiding", params=params)
        process = hosts.start(
            "ctl", launch(training), cwd=folder, light=True,
            env={**os.environ, **training.environment, **by_rsh(hosts), **slurm.env},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_for(lambda t=training, p=process: t.steps_of("run") >= 1 or p.poll() is not None)
        shown = shown_by(folder)
        training.hurry()
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        assert any(str(folder) in text for text in shown)
        secret = confided.read_text()
        assert len(secret) >= 32
        assert not any(secret in text for text in shown), name
        assert "do not authenticate each other" not in output
