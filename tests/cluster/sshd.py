"""A real sshd on every host but ctl, with its own keys."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.daemons import Daemons
from tests.cluster.hosts import Hosts
from tests.cluster.runs import PATIENCE
from tests.installed import missing_commands

# StrictModes would refuse keys in a folder below /tmp.
_SERVER = """\
HostKey {folder}/{host}.key
AuthorizedKeysFile {folder}/{host}.authorized
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
"""

_CLIENT = """\
Host *
    User root
    IdentityFile {folder}/client
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""

# Without PAM, sshd lets nobody in whose password is locked, as root's often is.
_SHADOW = "root:*:19000:0:99999:7:::\n"


def why_impossible() -> str | None:
    """Why sshd cannot run here, or None; checks only what it needs on top of hosts."""
    return missing_commands("sshd", "ssh", "ssh-keygen")


class Sshd(Daemons):
    """Lets root in on n1, n2, ... by `ssh -F config HOST`, from any host."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(hosts)
        self._folder = hosts.folder / "ssh"
        self.config: Path = self._folder / "config"

    def open(self) -> None:
        self._configure()
        for host in self.hosts.names:
            self._start(host)
        self._wait_until_listening()
        self.hosts.repairs.append(self.repair)

    def restart_node(self, host: str) -> None:
        """Start sshd on a host, after a boot."""
        self._start(host)
        self._wait_until_listening()

    @contextmanager
    def lock_out(self, host: str) -> Iterator[None]:
        """For the time of a `with`, let one host refuse every key."""
        self._authorized(host).write_text("")
        try:
            yield
        finally:
            shutil.copy(self._folder / "client.pub", self._authorized(host))

    def repair(self) -> None:
        """Start sshd where it has ended, for the next test."""
        for host, daemon in list(self._daemons.items()):
            if daemon.poll() is not None:
                self.restart_node(host)

    def _authorized(self, host: str) -> Path:
        return self._folder / f"{host}.authorized"

    def _configure(self) -> None:
        self._folder.mkdir(mode=0o700)
        (self._folder / "shadow").write_text(_SHADOW)
        self.config.write_text(_CLIENT.format(folder=self._folder))
        _make_key(self._folder / "client")
        known = []
        for host in self.hosts.names:
            key = self._folder / f"{host}.key"
            _make_key(key)
            known.append(f"{host},{self.hosts.address(host)} {Path(f'{key}.pub').read_text()}")
            shutil.copy(self._folder / "client.pub", self._authorized(host))
            text = _SERVER.format(folder=self._folder, host=host)
            (self._folder / f"{host}.config").write_text(text)
        (self._folder / "known_hosts").write_text("".join(known))

    def _start(self, host: str) -> None:
        # sshd's folder for its unprivileged half; a host's /run is empty at first.
        self.hosts.run(host, ["mkdir", "-p", "/run/sshd"])
        self.hosts.run(host, ["mount", "--bind", self._folder / "shadow", "/etc/shadow"])
        program = shutil.which("sshd")  # it starts itself again, and for that wants the full path
        assert program is not None
        with (self._folder / f"{host}.log").open("w") as log:
            self._daemons[host] = self.hosts.start(
                host, [program, "-D", "-e", "-f", self._folder / f"{host}.config"], stderr=log
            )
        self.hosts.daemons.add(self._daemons[host])

    def _wait_until_listening(self) -> None:
        deadline = time.monotonic() + PATIENCE
        for host, daemon in self._daemons.items():
            log = self._folder / f"{host}.log"
            while "Server listening" not in log.read_text():
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"sshd does not start on {host}: {log.read_text()}")
                time.sleep(0.01)


def _make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True)
