"""Starts ranks on this machine, restarts them, and reports which one failed and why.

torch's elastic agent meets the agents of other machines and decides when ranks are restarted;
the ranks' processes are ours.
"""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousHandler

from samestep.checkpoint.ownership import claim
from samestep.distributed.signals import SignalForwarder
from samestep.environment.secret import SECRET, new_secret, signer_of
from samestep.environment.variables import exporting, launch_variables, process_environment, thread_variables
from samestep.errors import InitError, LaunchError
from samestep.launch.commands.torchrun import TorchrunCommand
from samestep.launch.run.exit_report import ExitReport, after_signal, exit_report
from samestep.launch.run.orphans import Reaper
from samestep.launch.run.rank_processes import RankProcesses
from samestep.launch.run.rendezvous import StaticRendezvous, elastic_rendezvous
from samestep.words import counted

_SECONDS_TO_FOLLOW = 10.0
"""How long the other ranks get to notice by themselves that one has failed, and to report it."""
_SECONDS_TO_END = 30.0
"""How long they get after that: a checkpoint may be half written."""
_LONGEST_ORPHANED = 300.0
"""How long ranks may take to save when their launcher was killed."""

Report = Callable[[str], None]


def run_ranks(command: TorchrunCommand, report: Report, quiet: bool = False) -> None:
    """Start the ranks and wait; raises `RankFailed` with the first failing rank's own message.

    On one machine, ranks that were lost (killed, out of memory, crashed) are left out when
    the others are restarted. Over several nodes torch's rendezvous decides who takes part.
    """
    restarts = command.max_restarts if command.nodes is None else 0
    this_launch = uuid.uuid4().hex
    for left in reversed(range(restarts + 1)):
        try:
            _run_once(command, this_launch, report, quiet)
            return
        except ExitReport as ended:
            if not left or not ended.may_pass:
                raise ended.error from None
            nproc = max(command.min_nproc, command.nproc - len(ended.lost))
            report(
                f"{ended.headline}. Restarting on {counted(nproc, 'rank')} from the last checkpoint; "
                f"{left} restart(s) left"
            )
            command = replace(command, nproc=nproc)


def _run_once(command: TorchrunCommand, this_launch: str, report: Report, quiet: bool) -> None:
    claim(command.folder.parent, command.folder.name)
    _quiet_agent_logs()
    variables = {
        **command.rank_command.variables(),
        **thread_variables(command.threads),
        # Restarted ranks must not read the addresses of the ones before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if _rejoins(command) else "0",
    }
    if command.nodes is None:
        variables |= {**launch_variables(this_launch), SECRET: new_secret()}
    with exporting(variables):
        _run_agent(command, report, quiet)


def _run_agent(command: TorchrunCommand, report: Report, quiet: bool) -> None:
    reaper = Reaper(min(command.patience, _LONGEST_ORPHANED))
    started: list[RankAgent] = []
    try:
        with SignalForwarder(lambda number: _stop(started, number), lambda: _kill(started)):
            meeting = _meeting(command, report)
            agent = RankAgent(command, meeting, reaper, quiet)
            started.append(agent)
            result = agent.run()
            meeting.shutdown()
    except _Signalled as error:
        ranks = [rank for agent in started for rank in agent.processes.ranks]
        raise after_signal(error.number, ranks) from None
    except (RendezvousError, RuntimeError, OSError, InitError) as error:
        if command.nodes is None:
            raise
        what = "--rendezvous" if command.node_rank is None else "--master-addr and --master-port"
        raise LaunchError(
            f"the nodes could not meet at {command.rendezvous}: {error}. Start the command on every "
            f"node, with the same {what}, of a node that all of them reach"
        ) from error
    finally:
        reaper.close()
        if sys.stderr.isatty() and not quiet:
            Console(stderr=True).show_cursor()  # a rank that was killed has left it hidden by its progress bar
    if result is not None and result.is_failed():  # None: this machine came when all was over
        raise exit_report(agent.processes.ranks, command.folder, command.keeps_logs)


def _rejoins(command: TorchrunCommand) -> bool:
    """Return whether machines may join and leave, and meet again each time."""
    return command.nodes is not None and command.node_rank is None


def _meeting(command: TorchrunCommand, report: Report) -> RendezvousHandler:
    seconds = command.rank_command.config.distributed.timeout
    if command.nodes is None:
        return StaticRendezvous.of_one_machine(uuid.uuid4().hex[:8], seconds)
    signer = signer_of(process_environment(), "agents")
    if signer is None:
        raise LaunchError(
            f"a launch on {command.nodes} machines needs a secret, by which they know each other: set "
            f"{SECRET} to the same on every machine, such as the output of: openssl rand -hex 32 "
            "(docs/security.md)"
        )
    host, _, port = command.rendezvous.rpartition(":")
    nodes, name = command.nodes, command.run_id
    if command.node_rank is None:
        return elastic_rendezvous(host, int(port), nodes.fewest, nodes.most, name, signer)
    return StaticRendezvous(host, int(port), command.node_rank, nodes.most, name, seconds, signer, report)


class RankAgent(SimpleElasticAgent):
    """torch's elastic agent over processes of our own, which report how they end by a pipe."""

    def __init__(self, command: TorchrunCommand, meeting: RendezvousHandler, reaper: Reaper, quiet: bool) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=command.nproc,
            rdzv_handler=meeting,
            entrypoint=command.rank_argv[0],
            max_restarts=command.max_restarts if _rejoins(command) else 0,
            monitor_interval=0.1,
        )
        super().__init__(spec)
        self._command, self._reaper, self._quiet = command, reaper, quiet
        self.processes = RankProcesses(command.folder, reaper)
        self._signal: signal.Signals | None = None

    def stop(self, number: signal.Signals) -> None:
        """Forward a signal that stops the run; the ranks save first."""
        if not self.processes.running:
            raise _Signalled(number)  # while it waits for other machines
        self._signal = number
        self.processes.signal(number)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.processes = RankProcesses(self._command.folder, self._reaper)
        ids = {}
        for worker in worker_group.workers:
            # Rank 0's output goes to the terminal unless it is quiet, that of the others to files.
            redirected = self._quiet or worker.local_rank > 0
            argv = [word.replace("${local_rank}", str(worker.local_rank)) for word in self._argv]
            environ = {**process_environment(), **self._variables(worker_group, worker)}
            ids[worker.local_rank] = self.processes.start(worker.global_rank, argv, environ, redirected)
        return ids

    @property
    def _argv(self) -> tuple[str, ...]:
        return self._command.rank_argv

    def _variables(self, group: WorkerGroup, worker: Worker) -> Mapping[str, str]:
        """Return the variables that torchrun sets."""
        spec = group.spec
        return {
            "RANK": str(worker.global_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_RANK": str(worker.local_rank),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        del worker_group
        self.processes.poll()
        if self._signal is not None:
            if not self.processes.wait(self._command.patience):
                self.processes.end(0.0)
            raise _Signalled(self._signal)
        if self.processes.failed:
            self.processes.wait(_SECONDS_TO_FOLLOW)
            if self._signal is not None:
                raise _Signalled(self._signal)
            return RunResult(state=WorkerState.FAILED)
        if self.processes.running:
            return RunResult(state=WorkerState.HEALTHY)
        values = {rank.rank: 0 for rank in self.processes.ranks}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self.processes.end(_SECONDS_TO_END)


class _Signalled(Exception):
    """The launcher was told to stop."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


def _stop(started: Sequence[RankAgent], number: signal.Signals) -> None:
    if not started:
        raise _Signalled(number)
    started[0].stop(number)


def _kill(started: Sequence[RankAgent]) -> None:
    for agent in started:
        agent.processes.kill()


def _quiet_agent_logs() -> None:
    """The agent warns about children it ends; our own report is better."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
