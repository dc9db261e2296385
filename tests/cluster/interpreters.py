"""Preloaded interpreters on the hosts, so that a rank there need not import torch again."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.hosts import Hosts
from tests.cluster.opened import Opened
from tests.preloaded.client import server


class Interpreters(Opened):
    """A server on every host but ctl; ends with the host. See `tests.preloaded`."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._served: dict[str, int] = {}
        self.python: Path = server().python
        """The interpreter to start on any host; where there is no server, it is the real one."""

    def open(self) -> None:
        self.repair()
        self._hosts.repairs.append(self.repair)

    def close(self) -> None:
        if self.repair in self._hosts.repairs:
            self._hosts.repairs.remove(self.repair)

    def repair(self) -> None:
        """Start a server on each host that was booted since."""
        for host in self._hosts.names:
            process = self._hosts.first_process(host)
            if self._served.get(host) != process:
                server().serve_on(host, process)
                self._served[host] = process
