"""samestep bench scaling as a person types it, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import samestep

TASK = """
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment


class Late(samestep.Task):
    def __init__(self):
        self.late = detect_launch(process_environment()).rank == 1

    def model(self):
        return nn.Linear(8, 2)

    def train_data(self):
        return TensorDataset(torch.randn(96, 8), torch.randint(2, (96,)))

    def optimizers(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        if self.late:
            time.sleep(0.1)
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)
"""


@pytest.mark.requirement("003-T5-2", "003-T5-4", "003-R-2")
def test_a_slow_rank_of_a_task_is_found_by_name(tmp_path: Path) -> None:
    """Rank 1 sleeps in every lane."""
    (tmp_path / "late.py").write_text(TASK)
    config = tmp_path / "config.yaml"
    config.write_text("name: late\ntask: late.py:Late\nsteps: 4\nglobal_batch: 16\nlanes: 2\n")
    files = ("--output", "scaling.json", "--report", "scaling.html")
    done = samestep("bench", "scaling", config, "--worlds", "2", "--mode", "strong", "--quick", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert found["machine"]["task"] == "late.py:Late"
    assert found["machine"]["config"].startswith("sha256 ")
    rows = {row["variant"]: row for row in found["rows"]}
    assert rows.keys() == {"samestep", "ddp"}
    for loop, row in rows.items():
        assert (row["mode"], row["world"], row["backend"]) == ("strong", 2, "gloo")
        assert (row["global_batch"], row["lanes"]) == (16, 2)
        assert len(row["seconds"]) == 3
        assert row["low"] <= row["median"] <= row["high"]
        assert row["ratio_to_ddp"] is not None
        assert row["efficiency"] is None, "there is no smaller world"
        assert (row["phases"] is None) == (loop == "ddp")
    late = rows["samestep"]
    assert [one["rank"] for one in late["slow_ranks"]] == [1]
    assert late["ranks"][1]["compute"] >= 0.1
    assert late["phases"]["wait"]["median"] >= 0.02, "one of two ranks waits for most of 100 ms"
    assert all(one["memory_bytes"] > 1 << 20 for one in late["ranks"])
    host = late["ranks"][1]["host"]
    shown = " ".join(done.stdout.split())
    assert f"strong scaling, 2 ranks: rank 1 ({host}) computes" in shown
    assert "as long as the median rank" in (tmp_path / "scaling.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--variants", "horovod"), "--variants has horovod: there are samestep, ddp"),
        (("--worlds", "4", "--lanes", "2"), "4 ranks need 4 lanes or more"),
        (("--worlds", "2", "--nodes", "2"), "--nodes is for Slurm jobs: add --via slurm"),
        (("--worlds", "2", "--via", "ssh"), "needs the machines: add --hosts a,b"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = samestep("bench", "scaling", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
