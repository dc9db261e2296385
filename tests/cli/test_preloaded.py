"""What the server of the tests forks is to them what a process of its own would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import popen, processes_of, run, wait_for
from tests.preloaded.client import POSSIBLE, environment, server

pytestmark = pytest.mark.skipif(not POSSIBLE, reason="commands are forked on Linux only")

COLD = "what the others are compared with"

FACTS = """
import json, os, signal, sys, threading
signals = {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()}
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "main": __name__,
    "variables": {name: os.environ.get(name) for name in ("GIVEN", "PATH", "HOME")},
    "parent": os.getppid(), "leads_session": os.getsid(0) == os.getpid(),
    "group_of_parent": os.getpgid(0) == os.getpgid(os.getppid()),
    "signals": signals, "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
    "line": open("/proc/self/cmdline").read().strip(chr(0)).split(chr(0)),
    "stdin": sys.stdin.read(), "stdout": [sys.stdout.line_buffering, sys.stdout.write_through],
    "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
}))
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def facts(path: Path, cold: str, **options: Any) -> dict[str, Any]:
    process = popen(
        [sys.executable, str(path), "a", "b c", "ü"], cwd=path.parent, cold=cold,
        env={**environment(), "GIVEN": "x\ny"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        **options,
    )  # fmt: skip
    out, _ = process.communicate("some input", timeout=180)
    assert process.returncode == 0
    return json.loads(out)


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}], ids=["group", "session"])
def test_a_process_is_what_it_would_be_without_the_server(tmp_path: Path, options: dict[str, Any]) -> None:
    path = script(tmp_path, FACTS)
    forked, cold = facts(path, "", **options), facts(path, COLD, **options)
    assert forked == cold
    assert forked["parent"] == os.getpid()


def test_signals_that_are_ignored_here_are_ignored_there(tmp_path: Path) -> None:
    path = script(tmp_path, FACTS)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert facts(path, "")["signals"] == facts(path, COLD)["signals"]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit", "raise SystemExit(7)", "raise SystemExit('words')", "1 / 0",
        "raise KeyboardInterrupt", "import os; os._exit(9)", "import os; os.abort()",
        "import atexit; atexit.register(print, 'at the end'); print('before', end=' ')",
        "import threading, time; threading.Timer(0.1, print, ['a thread']).start()",
        "import os; print('left in a buffer'); os._exit(0)",
        "import signal; signal.raise_signal(signal.SIGTERM)",
    ],
)  # fmt: skip
def test_it_ends_as_it_would_without_the_server(tmp_path: Path, text: str) -> None:
    argv = [sys.executable, str(script(tmp_path, text))]
    forked, cold = run(argv, cwd=tmp_path), run(argv, cwd=tmp_path, cold=COLD)
    assert (forked.returncode, forked.stdout) == (cold.returncode, cold.stdout)
    assert forked.stderr.splitlines()[-1:] == cold.stderr.splitlines()[-1:]


WAITS = """
    import signal, sys, time
    def caught(number, frame):
        sys.exit(40 + number)
    signal.signal(signal.SIGTERM, caught)
    open("ready", "w")
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_can_be_signalled(tmp_path: Path, number: signal.Signals) -> None:
    with popen([sys.executable, str(script(tmp_path, WAITS))], cwd=tmp_path) as process:
        wait_for((tmp_path / "ready").exists)
        process.send_signal(number)
    assert process.returncode == (-9 if number == signal.SIGKILL else 40 + number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stand_in_hands_signals_and_its_own_end_on(tmp_path: Path, number: signal.Signals) -> None:
    path = script(tmp_path, WAITS + "    # " + tmp_path.name)
    program = server().programs / "python"
    with subprocess.Popen([program, path], cwd=tmp_path, env=environment()) as process:
        wait_for((tmp_path / "ready").exists)
        process.send_signal(number)
    assert process.returncode == (-9 if number == signal.SIGKILL else 40 + number)
    wait_for(lambda: not processes_of(path))
