"""Ranks of a function that a notebook defines: here a program that only `python -c` knows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.processes import children_of, popen, run, wait_for
from tests.variations import variations

FORKS = "the ranks are forks of the program itself"

TRAIN = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import samestep

def train(name, steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    losses = []
    with samestep.start(global_batch=16, steps=steps, name=name) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=16))
        for step in run.steps(loader):
            step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
            losses.append(step.loss.item())
        run.print(f"{run.context.world} ranks")
    return losses

torch.randn(300, 300) @ torch.randn(300, 300)  # threads that a fork does not have
one = samestep.notebook_launcher(train, 1, "one", 4)
two = samestep.notebook_launcher(train, 2, "two", 4)
assert one == two and len(one) == 4, (one, two)
print("the same")
"""

PLAIN = """
import json, os, psutil, samestep
import torch, torch.distributed as dist

class Answer:  # of the notebook's own
    def __init__(self, value): self.value = value

def listening(pid):
    return [c.laddr.ip for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]

def work(base):
    dist.init_process_group("gloo")
    value = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(value)
    heard = listening(os.getpid()) + listening(os.getppid())
    print(f"ä rank {dist.get_rank()}")
    dist.destroy_process_group()
    return Answer((value.item(), heard, torch.get_num_threads()))

if __name__ == "__main__":
    value, heard, threads = samestep.notebook_launcher(work, 2, 10).value
    assert (value, threads) == (21, 1)
    print(json.dumps(heard))
"""

FAILS = """
import os, time, samestep
def work():
    print(os.getpid(), flush=True)
    if os.environ["RANK"] == "1":
        raise KeyError("my own bug")
    time.sleep(3600)
try:
    samestep.notebook_launcher(work, 2)
except samestep.errors.RankFailed as error:
    print(error)
    print("output:", sorted(os.listdir(str(error).splitlines()[0].rpartition(": ")[2])))
"""

WAITS = """
import time, samestep
def work():
    print("waiting", flush=True)
    time.sleep(3600)
samestep.notebook_launcher(work, 2)
"""


GATED = """
import os, time, samestep
from samestep.launch.run import notebook
fork = notebook._ForkedRanks._fork
def slowly(self, rank, pipe):
    time.sleep(1)  # in which the rank before it would talk to the store
    with open(f"forked-{rank}", "w") as file: file.write(repr(time.monotonic()))
    return fork(self, rank, pipe)
notebook._ForkedRanks._fork = slowly
def work():
    with open(f"began-{os.environ['RANK']}", "w") as file: file.write(repr(time.monotonic()))
samestep.notebook_launcher(work, 3)
"""


def notebook(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run cells in a process that has imported torch and started no thread, as a kernel's is."""
    (folder / "cells.py").write_text(text)
    return run([sys.executable, "cells.py"], cwd=folder)


@pytest.mark.requirement("001-T-2")
def test_a_run_in_a_notebook_is_the_same_run(tmp_path: Path) -> None:
    done = notebook(TRAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith("ranks")] == ["1 ranks", "2 ranks"]
    assert done.stdout.endswith("the same\n")
    assert (tmp_path / "runs" / "two" / "checkpoints").is_dir()


def test_no_rank_begins_before_all_are_forked(tmp_path: Path) -> None:
    """A lock that the store's thread holds for a rank's message would stay held in the next fork."""
    done = notebook(GATED, tmp_path)
    assert done.returncode == 0, done.stderr
    times = {path.name: float(path.read_text()) for path in tmp_path.glob("*-[0-2]")}
    assert len(times) == 6
    last = max(at for name, at in times.items() if name.startswith("forked"))
    assert all(at > last for name, at in times.items() if name.startswith("began"))


def test_a_function_that_knows_only_torch(tmp_path: Path) -> None:
    done = notebook(PLAIN, tmp_path)
    assert done.returncode == 0, done.stderr
    shown, listening = done.stdout.splitlines()
    assert shown == "ä rank 0", "and not what rank 1 prints"
    heard = json.loads(listening)
    assert heard
    assert set(heard) <= {"127.0.0.1", "::1"}, "nobody else can connect"


def test_a_failing_rank_ends_all_and_raises(tmp_path: Path) -> None:
    done = notebook(FAILS, tmp_path)
    assert done.returncode == 0, done.stderr
    first, headline, *rest = done.stdout.splitlines()
    assert headline.startswith("rank 1 on ")
    assert "KeyError: 'my own bug'" in rest
    assert rest[-2].startswith(f"rank 0 (pid {first}): ended by the launcher")
    assert rest[-1] == "output: ['rank-1.out']"
    assert not psutil.pid_exists(int(first))


@pytest.mark.parametrize(
    "patched", variations(["_initialized = True", "_is_in_bad_fork = lambda: True"], kept=["_initialized = True"])
)
def test_cuda_that_was_used_before_is_an_error(tmp_path: Path, patched: str) -> None:
    """By the process itself; or a query has left forks without CUDA."""
    if patched.startswith("_is_in"):
        patched = f"is_initialized = lambda: False\ntorch.cuda.{patched}"
    done = notebook(f"import torch, samestep\ntorch.cuda.{patched}\nsamestep.notebook_launcher(print, 2)", tmp_path)
    assert done.returncode == 1
    assert "LaunchError: this process has used CUDA already" in done.stderr
    assert "restart the notebook's kernel" in done.stderr


MEAN_NOTHING = {
    "print, 0": "nproc is 0: give the number of ranks",
    "2, print": "2, which cannot be called",
    "samestep.notebook_launcher, 1, print, 1": "this process is rank 0 of environment already",
}


def test_calls_that_mean_nothing(tmp_path: Path) -> None:
    calls = "".join(
        f"try: samestep.notebook_launcher({call})\nexcept Exception as error: print(error)\n" for call in MEAN_NOTHING
    )
    done = notebook(f"import samestep\n{calls}", tmp_path)
    assert done.returncode == 0, done.stderr
    for message in MEAN_NOTHING.values():
        assert message in done.stdout


@pytest.mark.parametrize("number", variations([signal.SIGINT, signal.SIGKILL], kept=[signal.SIGINT]))
def test_ranks_end_with_their_notebook(tmp_path: Path, number: signal.Signals) -> None:
    with popen(
        [sys.executable, "-c", WAITS], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cold=FORKS
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        children = children_of(process.pid)
        assert len(children) == 3, "two ranks, and what ends them if their notebook is killed"
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=120)
    wait_for(lambda: not any(map(psutil.pid_exists, children)))
    if number == signal.SIGINT:
        assert errors.endswith("KeyboardInterrupt\n")
