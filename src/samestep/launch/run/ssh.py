"""Starts an agent on each host over ssh, shows their output, and ends all when one fails."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from samestep.distributed.signals import SignalForwarder
from samestep.environment.secret import new_secret
from samestep.errors import LaunchError, RankFailed, Stopped, code_of_ranks
from samestep.launch.commands.ssh import SshCommands

_SECONDS_TO_END = 10.0
"""How long the other agents get once one has failed: their ranks notice it by themselves."""
_SECONDS_TO_CONNECT = 30.0


def check_hosts(command: SshCommands) -> None:
    """Check that every host accepts our login and can start a rank; reports all failures at once."""
    with ThreadPoolExecutor(len(command.hosts)) as pool:
        found = list(pool.map(lambda node: _refusal(command, node), range(len(command.hosts))))
    refusals = [line for line in found if line]
    if refusals:
        raise LaunchError("\n".join(refusals))


def _refusal(command: SshCommands, node: int) -> str:
    host, argv = command.hosts[node].name, command.check(node)
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS_TO_CONNECT, check=False
        )
    except OSError as error:
        return f"{argv[0]} cannot be started here ({error.strerror}): install an ssh client"
    except subprocess.TimeoutExpired:
        return f"{host} did not answer within {_SECONDS_TO_CONNECT:g} s: check that it is up"
    if done.returncode == 0:
        return ""
    reason = next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")
    if done.returncode == 255:  # ssh's own
        return (
            f"{host} does not let you in without a password: {reason}. Copy a key to it "
            f"(ssh-copy-id {host}), and try: ssh -o BatchMode=yes {host} true"
        )
    return (
        f"{host} lacks what the run needs: {reason}. The working directory "
        f"({command.rank_command.working_folder}) and the interpreter ({command.rank_command.python}) must be the same "
        "there; launch.python names another one"
    )


def run_over_ssh(command: SshCommands) -> None:
    """Start all agents and wait; raises what the exit code of the first that failed means."""
    check_hosts(command)
    secret = new_secret()
    agents = [_Agent(command, node, secret) for node in range(len(command.hosts))]
    with SignalForwarder(lambda number: _stop(agents), lambda: _kill(agents)):
        try:
            failed = _first_to_fail(agents)
            if failed is not None:
                _stop(agents)
                _wait(agents, _SECONDS_TO_END if failed.was_lost else command.patience)
        finally:
            _kill(agents)
            for agent in agents:
                agent.close()
    if failed is not None:
        raise _failure_of(failed)


def _first_to_fail(agents: Sequence[_Agent]) -> _Agent | None:
    """Return the first agent that fails; None once all have succeeded."""
    while True:
        codes = [agent.process.poll() for agent in agents]
        failed = next((agent for agent, code in zip(agents, codes, strict=True) if code), None)
        if failed is not None or all(code == 0 for code in codes):
            return failed
        time.sleep(0.05)


def _wait(agents: Sequence[_Agent], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(a.process.poll() is None for a in agents):
        time.sleep(0.05)


def _stop(agents: Sequence[_Agent]) -> None:
    for agent in agents:
        agent.stop()


def _kill(agents: Sequence[_Agent]) -> None:
    for agent in agents:
        agent.process.kill()


def _failure_of(agent: _Agent) -> Exception:
    code = agent.process.returncode
    if code == Stopped.exit_code:
        return Stopped("the ranks have saved and stopped")
    return RankFailed(
        f"the agent on {agent.host} ended with exit code {code}; the output of its ranks is above", code_of_ranks(code)
    )


class _Agent:
    """The ssh to one host, whose lines are shown with the host's name."""

    def __init__(self, command: SshCommands, node: int, secret: str) -> None:
        self.host = command.hosts[node].name
        self.process = subprocess.Popen(
            command.argv(node),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and its exit code says why
            # Not on the command line, which every user of that machine can read.
            self.process.stdin.write(secret + "\n")
            self.process.stdin.flush()
        self._reader = threading.Thread(target=self._show, name=f"samestep-ssh-{node}", daemon=True)
        self._reader.start()

    def _show(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"[{self.host}] {line}", end="", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Let the agent stop its ranks: it ends when its standard input does."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            with suppress(BrokenPipeError):  # it ended before it had read the secret
                self.process.stdin.close()

    @property
    def was_lost(self) -> bool:
        """Return whether it failed, and did not just stop as requested."""
        return self.process.returncode != Stopped.exit_code

    def close(self) -> None:
        self.stop()
        self.process.wait()
        self._reader.join(2.0)
        if self.process.stdout is not None:
            self.process.stdout.close()
