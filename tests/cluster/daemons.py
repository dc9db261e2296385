"""What Slurm and sshd have in common on the hosts."""

from __future__ import annotations

import subprocess
from abc import abstractmethod

from tests.cluster.hosts import Hosts
from tests.cluster.opened import Opened


class Daemons(Opened):
    """Programs that serve on the hosts, and are repaired after each test."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self._daemons: dict[str, subprocess.Popen[str]] = {}

    @abstractmethod
    def repair(self) -> None:
        """Start again what a test has ended."""

    def close(self) -> None:
        """End the daemons; what they have started lives on until its host is closed."""
        if self.repair in self.hosts.repairs:
            self.hosts.repairs.remove(self.repair)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
