"""Scripts that know nothing of samestep, launched as torchrun does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import samestep
from tests.variations import variations

DDP = """
import argparse, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--time", type=int, default=0)
parser.add_argument("--fail-on", type=int, default=-1)
given = parser.parse_args()
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(2, 1))
if rank == given.fail_on:
    raise KeyError("my own bug")
model(torch.full((4, 2), rank + 1.0)).sum().backward()
gradient = model.module.weight.grad.tolist()
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
with open(f"rank-{rank}.json", "w") as file:
    found = {name: os.environ[name] for name in names}
    json.dump({**found, "argv": sys.argv[1:], "gradient": gradient, "name": __name__}, file)
print(f"this is rank {rank}", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(DDP)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    variations(
        [
            ["--nproc", "2", "package/train.py", "--lr", "0.1", "--time", "5"],
            ["package/train.py", "--nproc", "2", "--", "--lr", "0.1", "--time", "5"],
            ["--nproc", "2", "-m", "package.train", "--lr", "0.1", "--time", "5"],
        ],
        kept=[["--nproc", "2", "package/train.py", "--lr", "0.1", "--time", "5"]],
    ),
    ids=["torchrun", "dashes", "module"],
)
def test_a_ddp_script_runs_as_with_torchrun(folder: Path, words: list[str]) -> None:
    done = samestep("launch", *words, cwd=folder, cold="ranks in which nobody has imported torch yet")
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    for rank, found in enumerate(ranks):
        assert found["argv"] == ["--lr", "0.1", "--time", "5"]
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
        assert found["MASTER_ADDR"] == "127.0.0.1", "nobody else can connect"
        assert found["name"] == "__main__"
        assert found["gradient"] == [[6.0, 6.0]], "the mean over both ranks"
    assert done.stdout == "this is rank 0\n"
    assert "opened no process group" not in done.stderr
    output = folder / "runs" / "train" / "launch" / "rank-1.out"
    assert output.read_text().endswith("this is rank 1\n")


def test_the_first_failing_rank_is_shown_first(folder: Path) -> None:
    done = samestep("launch", "--nproc", "2", "package/train.py", "--fail-on", "1", cwd=folder)
    assert done.returncode == 1
    lines = done.stderr[done.stderr.index("samestep: rank 1 on ") :].splitlines()
    assert lines[1] == "Traceback (most recent call last):"
    assert "train.py" in lines[2], "the script's own part of it"
    assert "KeyError: 'my own bug'" in lines
    assert lines[-1].startswith("rank 0 (pid "), "and how the others ended"


def test_ranks_that_know_nothing_of_each_other_are_warned_about(folder: Path) -> None:
    (folder / "alone.py").write_text("import torch\ntorch.nn.Linear(2, 1)\n")
    done = samestep("launch", "--nproc", "2", "alone.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the script ran 2 times, and opened no process group") == 1
    one = samestep("launch", "--nproc", "1", "alone.py", cwd=folder)
    assert "opened no process group" not in one.stderr


def test_options_of_runs_are_refused(folder: Path) -> None:
    wrong = samestep("launch", "package/train.py", "--time", "5", cwd=folder)
    assert wrong.returncode == 2
    assert "--time is for runs" in wrong.stderr
    assert not (folder / "runs").exists(), "nothing was started"


def test_exit_codes_of_scripts(tmp_path: Path) -> None:
    (tmp_path / "done.py").write_text("import sys\nsys.exit()")
    (tmp_path / "broken.py").write_text("import sys\nsys.exit(3)")
    done = samestep("launch", "--nproc", "2", "done.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    broken = samestep("launch", "--nproc", "2", "broken.py", cwd=tmp_path)
    assert broken.returncode == 1
    assert "ended with exit code 3" in broken.stderr
