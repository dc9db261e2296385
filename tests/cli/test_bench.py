"""samestep bench as a person types it, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.bench.sizes import OPERATIONS
from tests.cli.processes import samestep, torchrun

SMALL = ("--largest", "4KB", "--rounds", "3")


@pytest.mark.requirement("003-T5-3")
def test_messages_of_two_and_four_ranks(tmp_path: Path) -> None:
    files = ("--output", "comm.json", "--report", "comm.html")
    done = samestep("bench", "comm", "--worlds", "2,4", *SMALL, *files, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "comm.json").read_text())
    rows = {(row["operation"], row["world"], row["bytes"]): row for row in found["rows"]}
    assert rows.keys() == {
        (operation, world, size) for operation in OPERATIONS for world in (2, 4) for size in (1024, 4096)
    }
    for (operation, world, size), row in rows.items():
        assert 0 < row["low"] <= row["median"] <= row["high"]
        assert (len(row["seconds"]), row["backend"]) == (3, "gloo")
        reduces = operation in ("all-reduce", "tree-sum")
        share = {"all-gather": (world - 1) / world}.get(operation, 1.0)
        share = 2 * (world - 1) / world if reduces else share
        assert row["bus_bytes"] == pytest.approx(share * size / row["median"])
    page = (tmp_path / "comm.html").read_text()
    assert "bus bandwidth, 4 ranks" in page
    assert "point-to-point" in page
    again = samestep("bench", "comm", "--worlds", "2", *SMALL, "--report", "comm.json", cwd=tmp_path)
    assert again.returncode == 2, again.stderr
    assert "is no page of samestep" in again.stderr


@pytest.mark.variation("test_messages_of_two_and_four_ranks, started by torchrun")
def test_as_ranks_of_another_launcher(tmp_path: Path) -> None:
    done = torchrun("bench", "comm", *SMALL, "--operations", "broadcast", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "gloo on" in done.stdout
    assert done.stdout.count("broadcast") == 3, "two sizes, and the line through them"
    assert "latency" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench comm", "there is one rank only, and nobody to send to: give --worlds 2,4"),
        ("bench comm --via slurm", "--via slurm starts ranks: say how many, such as --worlds 1,2"),
        ("bench comm --worlds 2 --nodes 2", "--nodes is for Slurm jobs: add --via slurm"),
        ("bench comm --worlds 2 --hosts a,b", "--hosts is for mpirun and ssh"),
        ("bench comm --operations all-to-all", "--operations has all-to-all: there are all-reduce"),
        ("bench comm --smallest 1TB", "--smallest is '1TB': give a size"),
        ("bench comm --worlds 2,x", "--worlds is '2,x': give numbers"),
        ("bench comm --output nowhere/comm.json", "there is no directory nowhere"),
        ("bench scaling --variants horovod", "--variants has horovod: there are samestep, ddp"),
        ("bench scaling --worlds 4 --lanes 2", "4 ranks need 4 lanes or more"),
        ("bench scaling --worlds 2 --via ssh", "needs the machines: add --hosts a,b"),
        ("tune all --write best.yaml", "--write includes a config, and none is given"),
        ("tune all mine.yaml --write mine.yaml", "mine.yaml exists already, and is kept"),
        ("tune all mine.yaml distributed.world_size=2", "distributed.world_size is 2"),
        ("tune lr mine.yaml --from 1 --to 0.1", "give a --from above 0 and a larger --to"),
    ],
)
def test_mistakes_are_named(words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: task.py:MyTask\nglobal_batch: 64\nepochs: 1\n")
    done = samestep(*words.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
