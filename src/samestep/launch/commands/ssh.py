"""An agent on each of several machines, started over ssh. No torch here, and nothing is run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.environment.node_lists import rendezvous_ports
from samestep.environment.secret import SECRET, SHELL_SECRET
from samestep.environment.variables import process_environment
from samestep.launch.commands.rank_command import RankCommand, check_world, quoted, surroundings
from samestep.launch.commands.recorded import VARIABLE
from samestep.launch.commands.size import Host, ranks_of
from samestep.launch.commands.summary import Rows, plan_rows


@dataclass(frozen=True)
class SshCommands:
    """One `samestep launch` on each host; the first host has rank 0."""

    rank_command: RankCommand
    hosts: tuple[Host, ...]
    port: int
    """Where the agents meet, on the first host."""

    @property
    def world(self) -> int | None:
        """None if some host decides itself how many ranks it takes."""
        return ranks_of(self.hosts)

    @property
    def patience(self) -> float:
        """Seconds the ranks get to save and stop after a signal."""
        return max(30.0, self.rank_command.config.distributed.timeout)

    @property
    def ssh(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.rank_command.config.launch.ssh))

    def argv(self, node: int) -> tuple[str, ...]:
        """Return what starts the agent of a node."""
        alive = ("-o", "ServerAliveInterval=15")  # or the ssh to a silent host never ends
        # What a run is resumed by is this launch, not one machine's part of it.
        typed = {k: v for k, v in process_environment().items() if k == VARIABLE}
        command = self.remote(node, "--stdin-control", variables=typed)
        return (*self.ssh, *alive, "--", self.hosts[node].name, command)

    def check(self, node: int) -> tuple[str, ...]:
        """Return what checks that a node accepts our login without a password, and has what the run needs."""
        command = _in_folder(self.rank_command, [self.rank_command.python, "-c", "import samestep"])
        options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
        return (*self.ssh, *options, "--", self.hosts[node].name, command)

    def remote(self, node: int, *more: str, variables: Mapping[str, str] | None = None) -> str:
        """Return the command line for a node's login shell."""
        options = ["--read-secret"]
        options += ["--via", "torchrun", "--nodes", str(len(self.hosts)), "--node-rank", str(node)]
        ranks = self.hosts[node].ranks
        options += [] if ranks is None else ["--nproc", str(ranks)]
        options += ["--master-addr", self.hosts[0].address, "--master-port", str(self.port)]
        words = [self.rank_command.python, *self.rank_command.launch(*options, *more)]
        return _in_folder(self.rank_command, words, variables)

    def script(self) -> str:
        lines = [
            "#!/bin/bash",
            "# What samestep launch --via ssh starts: an agent on each host. samestep also checks the",
            "# hosts first, and ends all agents when one fails.",
            SHELL_SECRET,
            "agents=()",
            *(
                f'{quoted([*self.ssh, "--", host.name, self.remote(node)])} <<<"${SECRET}" &\nagents+=($!)'
                for node, host in enumerate(self.hosts)
            ),
            "code=0",
            'for agent in "${agents[@]}"; do wait "$agent" || code=$?; done',
            'exit "$code"',
        ]
        return "\n".join(lines) + "\n"

    def summary(self) -> Rows:
        return plan_rows(self.rank_command.config, self.world, len(self.hosts), None)


def ssh_commands(rank_command: RankCommand, hosts: tuple[Host, ...], name: str, port: int | None = None) -> SshCommands:
    """Return the agents of a config; `name` distinguishes this launch from any other."""
    launch = SshCommands(rank_command, hosts, port or rendezvous_ports(name)[0])
    if launch.world is not None:
        check_world(rank_command.config, launch.world, f"--hosts take {launch.world} ranks")
    return launch


def _in_folder(rank_command: RankCommand, words: list[str], variables: Mapping[str, str] | None = None) -> str:
    """Return a command in the working directory, after the setup lines of the config.

    In a login bash: the user's shell may be any, and modules are set up there. What refers to a
    variable is looked up by the agent there: a command line is no place for its value.
    """
    lines = ["set -e", *surroundings(rank_command, variables or {}, references=False)]
    lines.append(f"exec {quoted(words)}")
    return quoted(["exec", "bash", "-lc", "\n".join(lines)])
