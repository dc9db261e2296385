"""Several hosts on one machine, out of Linux namespaces.

Each host has its own network interface, host name, process table, /dev/shm, /run and
/etc/hosts. All other files are shared, as on a cluster with a network file system; so are those of the tests where
they are in memory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path
from typing import Any

from tests.cluster.opened import Opened
from tests.installed import missing_commands

_CLONE_NEWPID = 0x20000000
_NAMESPACES = Path("/run/netns")
_PREFIX = "samestep-"

# The first process of a host. It prints its process id as seen from outside, which only the old
# /proc knows, and it lives until its input ends: so the host dies with the tests, even if they
# are killed. bash collects the orphans of the host, as a first process must.
_FIRST_PROCESS = """
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin  # a test's own is hidden in between
read -r pid _ </proc/self/stat
hostname "$1"
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mkdir -p "$2/files"
mount --bind "$3" "$2/files"
mount -t tmpfs tmpfs /dev/shm
mkdir -p "$3"  # what tests write is on all hosts, also where it is in memory (tests/conftest.py)
mount --bind "$2/files" "$3"
mount -t tmpfs tmpfs /run
mount --bind "$2/hosts" /etc/hosts
echo "$pid"
read -r _
"""

_LIGHT = """
mount --bind "$1/hosts" /etc/hosts
shift
exec "$@"
"""

# Like ssh, it carries over no variables and starts in the home folder.
_RSH = """#!/bin/bash
# rsh [options] HOST command...: runs the command on a host; usable from light processes.
while [[ $1 == -* ]]; do shift; done
host=$1
shift
case $host in
10.77.0.1) host=ctl ;;
10.77.0.*) host=n$((${{host##*.}} - 10)) ;;
esac
if ! pid=$(cat "{folder}/$host/pid" 2>/dev/null); then
    echo "rsh: cannot connect to $host: No route to host" >&2
    exit 255
fi
exec nsenter -t "$pid" -n -u -i -m -p -- env -i --chdir="$HOME" HOME="$HOME" USER=root \\
    PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin /bin/sh -c "$*"
"""

_PROBE = """
set -e
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
ip netns add probe
ip link add br0 type bridge
ip link add name eth0 netns probe type veth peer name v0
nsenter --net=/run/netns/probe true
"""


def why_impossible() -> str | None:
    """Why hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "making hosts out of namespaces needs root"
    missing = missing_commands("ip", "nsenter", "unshare", "bash", "mount", "hostname")
    if missing:
        return missing
    # All it makes is inside namespaces that end with it.
    probe = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "bash", "-c"]
    answer = subprocess.run([*probe, _PROBE], capture_output=True, text=True)
    return f"namespaces are refused here: {answer.stderr.strip()}" if answer.returncode else None


class Hosts(Opened):
    """`ctl` (10.77.0.1) and `n1`, `n2`, ... (10.77.0.11 and on), joined by a bridge."""

    def __init__(self, count: int) -> None:
        self.names: tuple[str, ...] = tuple(f"n{index + 1}" for index in range(count))
        _delete_left_namespaces()
        # Not in the tests' temporary folder, whose path is long: a unix socket's has 108 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
        self.rsh = self.folder / "rsh"
        # Of the services that run on the hosts: their processes, and how each is made whole.
        self.daemons: set[subprocess.Popen[str]] = set()
        self.repairs: list[Callable[[], None]] = []
        self._first: dict[str, subprocess.Popen[str]] = {}
        self._pids: dict[str, int] = {}
        self._processes: dict[str, list[subprocess.Popen[str]]] = {}

    def open(self) -> None:
        self._make()

    def close(self) -> None:
        """End every process on every host and remove the hosts."""
        for host in list(self._first):
            self._end_processes(host)
        for host in ("switch", "ctl", *self.names):
            if (_NAMESPACES / self._namespace(host)).exists():
                _ip("netns", "del", self._namespace(host))
        shutil.rmtree(self.folder, ignore_errors=True)

    def address(self, host: str) -> str:
        """The address of a host on the network that joins them."""
        return "10.77.0.1" if host == "ctl" else f"10.77.0.{10 + int(host[1:])}"

    def first_process(self, host: str) -> int:
        """The id, as seen from outside, of the process that lives as long as the host is on."""
        return self._pid(host)

    def start(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        light: bool = False,
        **popen_options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command on a host; `env` comes on top of the tests' own environment.

        The process returned is the command itself: a signal to it reaches the command, and its
        exit code is the command's. A light process has the network, name and /etc/hosts of the
        host but sees the processes of the whole machine: a launcher that uses `rsh` must be one.
        """
        options = {"stdin": subprocess.DEVNULL, "text": True, **popen_options}
        options["env"] = {**os.environ, **(env or {})}
        command = ["env", f"--chdir={cwd or Path.cwd()}", *map(str, argv)]
        enter = ["nsenter", "-t", str(self._pid(host)), "-n", "-u"]
        if light:
            state = str(self.folder / host)
            command = [*enter, "unshare", "--mount", "bash", "-c", _LIGHT, "light", state, *command]
            process = subprocess.Popen(command, **options)
        else:
            with self._children_are_born_on(host):
                process = subprocess.Popen([*enter, "-i", "-m", "--", *command], **options)
        running = [old for old in self._processes[host] if old.poll() is None]
        self._processes[host] = [*running, process]
        return process

    def run(
        self, host: str, argv: Sequence[str | Path], *, timeout: float = 300.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, with the options of `start`; TimeoutError has what it printed."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.start(host, argv, start_new_session=True, **pipes, **options)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = _kill_group(process)
            line = " ".join(map(str, argv))
            raise TimeoutError(
                f"on {host}, no end within {timeout} s: {line}\nstdout:\n{out}\nstderr:\n{err}"
            ) from None
        except BaseException:
            _kill_group(process)
            raise
        return subprocess.CompletedProcess(list(map(str, argv)), process.returncode, out, err)

    def power_off(self, host: str) -> None:
        """Kill all processes of a host, then cut it off.

        Its peers see their connections close. For a failure that closes none, unplug it first.
        """
        self._pid(host)
        self._end_processes(host)
        self.plug(host, False)

    def boot(self, host: str) -> None:
        """Start a host that is powered off; it comes back plugged in and without processes."""
        if host in self._first:
            raise RuntimeError(f"{host} is running already")
        state = self.folder / host
        files = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()) / f"pytest-of-{getuser()}"
        files.mkdir(mode=0o700, exist_ok=True)
        first = subprocess.Popen(
            [
                *("nsenter", f"--net={_NAMESPACES / self._namespace(host)}"),
                *("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork"),
                *("bash", "-c", _FIRST_PROCESS, "host", host, str(state), str(files)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the tests, which then close the hosts
        )
        assert first.stdout is not None
        pid = first.stdout.readline().strip()
        if not pid.isdigit():
            first.wait()
            raise RuntimeError(f"{host} does not start: {pid}")
        self._first[host], self._pids[host], self._processes[host] = first, int(pid), []
        (state / "pid").write_text(pid)
        self.plug(host, True)

    def plug(self, host: str, connected: bool) -> None:
        """Plug the network cable of a host in, or pull it: packets are silently lost."""
        _ip("-n", self._namespace("switch"), "link", "set", host, "up" if connected else "down")

    @contextmanager
    def limited(self, host: str, rate: str, burst: str, queue: str) -> Iterator[None]:
        """Give a host's link a rate such as `100mbit`, in both directions."""
        ends = ((self._namespace(host), "eth0"), (self._namespace("switch"), host))
        for namespace, device in ends:
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate,
                 "burst", burst, "latency", queue)  # fmt: skip
        try:
            yield
        finally:
            for namespace, device in ends:
                _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    @contextmanager
    def delayed(self, host: str, milliseconds: float) -> Iterator[None]:
        """Delay what a host sends and receives; its network is gone afterwards."""
        script = Path(__file__).with_name("delay_wire.py")
        words = (self._namespace(host), self._namespace("switch"), f"w{host}", str(milliseconds))
        wire = subprocess.Popen([sys.executable, script, *words], stdout=subprocess.PIPE, text=True)
        try:
            assert wire.stdout is not None
            if wire.stdout.readline() != "up\n":
                raise RuntimeError(f"the wire of {host} did not come up")
            yield
        finally:
            wire.kill()
            wire.communicate()

    @contextmanager
    def alias(self, host: str, name: str, address: str) -> Iterator[None]:
        """On this one host, for the time of a `with`, let a name mean another address."""
        self._write_hosts_file(host, {name: address})
        try:
            yield
        finally:
            self._write_hosts_file(host)

    @contextmanager
    def second_interface(self, host: str) -> Iterator[str]:
        """For the time of a `with`, give a host an eth1 that leads nowhere; gives its address."""
        address = self.address(host).replace("10.77.", "10.88.")
        namespace, switch = self._namespace(host), self._namespace("switch")
        _ip(
            *("link", "add", "name", "eth1", "netns", namespace, "type", "veth"),
            *("peer", "name", f"{host}-1", "netns", switch),
        )
        try:
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth1")
            _ip("-n", namespace, "link", "set", "eth1", "up")
            _ip("-n", switch, "link", "set", f"{host}-1", "up")
            yield address
        finally:
            _ip("-n", namespace, "link", "del", "eth1")

    def running(self) -> set[subprocess.Popen[str]]:
        """The processes started on any host that have not ended, but for daemons."""
        started = {process for processes in self._processes.values() for process in processes}
        return {process for process in started - self.daemons if process.poll() is None}

    def repair(self, keep: Collection[subprocess.Popen[str]]) -> None:
        """Make the cluster whole for the next test: all on, plugged in, services running.

        A host on which something else runs than `keep` is booted again: a process killed alone
        could leave its children.
        """
        left = self.running().difference(keep)
        for host in ("ctl", *self.names):
            if left.intersection(self._processes.get(host, ())):
                self.power_off(host)
            if host not in self._first:
                self.boot(host)
            self.plug(host, True)
        for repair in self.repairs:
            repair()

    def _make(self) -> None:
        self.rsh.write_text(_RSH.format(folder=self.folder))
        self.rsh.chmod(0o755)
        switch = self._namespace("switch")
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in ("ctl", *self.names):
            namespace = self._namespace(host)
            _ip("netns", "add", namespace)
            _ip(
                *("link", "add", "name", "eth0", "netns", namespace, "type", "veth"),
                *("peer", "name", host, "netns", switch),
            )
            _ip("-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", host, "master", "br0")
            (self.folder / host).mkdir()
            self._write_hosts_file(host)
            self.boot(host)

    def _namespace(self, host: str) -> str:
        return f"{self.folder.name}-{host}"

    def _pid(self, host: str) -> int:
        if host not in self._pids:
            raise RuntimeError(f"{host} is powered off, or no host of {', '.join(self.names)}, ctl")
        return self._pids[host]

    def _write_hosts_file(self, host: str, changes: Mapping[str, str] | None = None) -> None:
        addresses = {"localhost": "127.0.0.1"}
        addresses.update({name: self.address(name) for name in ("ctl", *self.names)})
        addresses.update(changes or {})
        # Written in place: the host has this very file mounted.
        text = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (self.folder / host / "hosts").write_text(text)

    @contextmanager
    def _children_are_born_on(self, host: str) -> Iterator[None]:
        # A process cannot change its own process table, only that of its coming children. nsenter
        # would fork once more for this, and signals to our child would not reach the command.
        with Path("/proc/self/ns/pid").open() as ours, Path(f"/proc/{self._pid(host)}/ns/pid").open() as theirs:
            _set_namespace(theirs.fileno())
            try:
                yield
            finally:
                _set_namespace(ours.fileno())

    def _end_processes(self, host: str) -> None:
        (self.folder / host / "pid").unlink(missing_ok=True)
        first = self._first.pop(host)
        with suppress(ProcessLookupError):
            os.kill(self._pids.pop(host), signal.SIGKILL)
        for process in self._processes.pop(host):
            process.kill()  # light processes are in our own process table
            # The kernel ends a process table only when all in it were waited for.
            process.wait()
        first.wait()
        for pipe in (first.stdin, first.stdout):
            assert pipe is not None
            pipe.close()


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "setns: cannot enter the process table of a host")


def _kill_group(process: subprocess.Popen[str]) -> tuple[str, str]:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=5)
    except subprocess.TimeoutExpired as late:  # a process of another group holds the pipes
        return _text(late.stdout), _text(late.stderr)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*words: str) -> None:
    answer = subprocess.run(words, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"{' '.join(words)}: {answer.stderr.strip()}")


def _delete_left_namespaces() -> None:
    """Namespaces of tests that were killed: their hosts have died, but the names stay."""
    for left in _NAMESPACES.glob(f"{_PREFIX}*"):
        owner = left.name.removeprefix(_PREFIX).split("-")[0]
        if not Path("/proc", owner).exists():
            # Another session may have deleted it in the meantime.
            with suppress(RuntimeError):
                _ip("netns", "del", left.name)
