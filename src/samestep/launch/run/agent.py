"""Starts ranks by torch's elastic agent, restarts them, and reports which one failed and why."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    SignalException,
    Std,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from samestep.environment.interfaces import address_towards, is_loopback
from samestep.environment.variables import exporting, launch_variables, thread_variables
from samestep.errors import LaunchError, RankFailed, Stopped
from samestep.launch.commands.torchrun import TorchrunCommand
from samestep.launch.run.exit_report import ExitReport, read_error, read_failures

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
"""What the agent forwards to its ranks, which then save and stop."""

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
            _run_once(command, this_launch, quiet)
            return
        except ExitReport as ended:
            if not left or not ended.may_pass:
                raise ended.error from None
            nproc = max(command.min_nproc, command.nproc - len(ended.lost))
            report(
                f"{ended.headline}. Restarting on {nproc} rank(s) from the last checkpoint; "
                f"{left} restart(s) left"
            )
            command = replace(command, nproc=nproc)


def _run_once(command: TorchrunCommand, this_launch: str, quiet: bool) -> None:
    started = time.time()
    command.folder.mkdir(parents=True, exist_ok=True)
    config = _agent_config(command, quiet)
    interpreter, *arguments = command.rank_argv
    _quiet_agent_logs()
    variables = {
        **command.rank_command.config.launch.environment,
        **thread_variables(command.threads),
        # Restarted ranks must not read the addresses of the ones before.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if _meets_again(command) else "0",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": _SIGNALS,
    }
    if command.nodes is None:
        variables |= launch_variables(this_launch)
    try:
        with exporting(variables), _SecondInterrupt():
            elastic_launch(config, entrypoint=interpreter)(*arguments)
    except ChildFailedError as error:
        raise read_failures(error.failures, command.nproc, command.folder) from None
    except SignalException as error:
        files = command.folder.glob(f"{config.run_id}_*/attempt_*/*/error.json")
        ours = [path for path in files if path.stat().st_mtime >= started]
        raise _on_signal(error.sigval, ours) from None
    except (RuntimeError, OSError) as error:
        if command.nodes is None:
            raise
        what = "--rendezvous" if command.node_rank is None else "--master-addr and --master-port"
        raise LaunchError(
            f"the nodes could not meet at {command.rendezvous}: {error}. Start the command on every "
            f"node, with the same {what}, of a node that all of them reach"
        ) from error


def _meets_again(command: TorchrunCommand) -> bool:
    """Whether machines may join and leave, and meet again each time."""
    return command.nodes is not None and command.node_rank is None


def _agent_config(command: TorchrunCommand, quiet: bool) -> LaunchConfig:
    # Rank 0's output goes to the terminal unless it is quiet, that of the others to files.
    redirected = range(command.nproc) if quiet else range(1, command.nproc)
    known = {field.name for field in fields(LaunchConfig)}
    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "run_id": uuid.uuid4().hex[:8],
        "rdzv_endpoint": "127.0.0.1:0",  # the agent finds a free port and serves it
        "local_addr": "127.0.0.1",
        "max_restarts": 0,
        # Ranks save before they stop; a hang is noticed after the timeout.
        "shutdown_timeout": int(command.patience),
        "signals_to_handle": _SIGNALS,
    }
    if command.nodes is not None:
        options |= {
            "min_nodes": command.nodes.fewest,
            "max_nodes": command.nodes.most,
            "run_id": command.run_id,
            "rdzv_endpoint": command.rendezvous,
            "local_addr": _address_for_others(command.rendezvous),
        }
    if command.node_rank is not None:
        seconds = int(command.rank_command.config.distributed.timeout)
        options["rdzv_configs"] = {"rank": command.node_rank, "timeout": max(1, seconds)}
    elif command.nodes is not None:
        options |= {
            "max_restarts": command.max_restarts,
            # A node that is gone is left out after 16 s; less, and clocks that are some seconds
            # apart would make a node seem dead, since torch compares their times.
            "rdzv_configs": {
                "last_call_timeout": 5,
                "keep_alive_interval": 2,
                "keep_alive_max_attempt": 8,
            },
        }
    return LaunchConfig(
        nproc_per_node=command.nproc,
        rdzv_backend="c10d" if command.node_rank is None else "static",
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(command.folder), redirects=dict.fromkeys(redirected, Std.ALL)
        ),
        # Older versions of torch lack some of these; they read the same from the environment.
        **{name: value for name, value in options.items() if name in known},
    )


def _address_for_others(rendezvous: str) -> str | None:
    """This machine's address for the ranks of others; None lets torch use its host name.

    The others may not be able to resolve the name. But on the machine where they meet, the
    address towards the rendezvous is loopback.
    """
    address = address_towards(rendezvous.rpartition(":")[0])
    return None if address is None or is_loopback(address) else address


def _quiet_agent_logs() -> None:
    """The agent warns about children it ends; our own report is better."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _on_signal(number: signal.Signals, files: Sequence[Path]) -> Exception:
    """How the ranks ended after a signal that the launcher forwarded to them."""
    cause = ""
    for path in files:
        with suppress(ValueError):
            kind, message, _ = read_error(json.loads(path.read_text(encoding="utf-8")))
            if kind == "Stopped":
                return Stopped(message)
            if kind != "PeerLost":
                cause = f": {kind}: {message}"
    return RankFailed(f"stopped by {number.name} before it could be saved{cause}", 128 + number)


class _SecondInterrupt:
    """While entered, a second Ctrl-C kills the ranks; the agent would keep waiting for them.

    Python writes each signal's number to a pipe before any handler runs, so this works beside
    the agent's own handlers.
    """

    def __enter__(self) -> None:
        self._watches = threading.current_thread() is threading.main_thread()
        if not self._watches:
            return  # Python delivers signals to the main thread only
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="samestep-interrupts", daemon=True)
        self._thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not self._watches:
            return
        signal.set_wakeup_fd(self._before)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        interrupts = 0
        while numbers := os.read(self._read, 16):
            interrupts += numbers.count(signal.SIGINT)
            if interrupts > 1:
                _end_children()


def _end_children() -> None:
    """Kill what this process started, where /proc lists it; each rank leads a process group."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if not children.exists():
        return
    for child in map(int, children.read_text().split()):
        with suppress(ProcessLookupError, PermissionError):
            if os.getpgid(child) == child:
                os.killpg(child, signal.SIGKILL)
