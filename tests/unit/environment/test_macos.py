"""What Linux has and macOS does not is needed for no training in one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TASKS = Path(__file__).parents[2] / "distributed" / "tasks.py"

# torch and the standard library choose their own ways by the platform when they are imported.
ON_MACOS = """
import builtins, io, json, os, pathlib, signal, socket, sys
import ctypes.util, multiprocessing, subprocess, tempfile
import torch, torch.distributed, torch.utils.data, torchmetrics

LINUX_ONLY = {
    os: ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create",
         "eventfd", "pidfd_open", "splice", "copy_file_range", "getrandom"),
    signal: ("sigwaitinfo", "sigtimedwait", "SIGSTKFLT", "SIGPWR", "SIGPOLL", "SIGRTMIN", "SIGRTMAX"),
    socket: ("SO_PEERCRED", "AF_NETLINK", "AF_PACKET", "SO_BINDTODEVICE", "SOCK_CLOEXEC"),
}
for module, names in LINUX_ONLY.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"

real_open = io.open
def without_proc(file, *more, **options):
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return real_open(file, *more, **options)
io.open = builtins.open = without_proc

import samestep
from samestep.environment.hardware import allowed_cpus

config = json.loads(sys.argv[1])
with samestep.create_run_context(samestep.load_config(config), samestep.detect_hardware()) as context:
    outcome = samestep.train_once(samestep.load_config(config), context)
print(json.dumps({"steps": outcome.steps, "cpus": len(allowed_cpus())}))
"""


def test_one_process_trains_without_anything_that_only_linux_has(tmp_path: Path) -> None:
    config = {
        "task": f"{TASKS}:Everything",
        "global_batch": 32,
        "lanes": 8,
        "steps": 3,
        "run_dir": str(tmp_path / "run"),
        "distributed": {"threads_per_rank": 1, "device": "cpu"},
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_MACOS, json.dumps(config)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["steps"] == 3
    assert answer["cpus"] >= 1
