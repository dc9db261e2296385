"""The scripts of hpc/ by a real sbatch, made smaller by its options."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from samestep.train.record import RunRecord
from tests.cluster.runs import ROOT, Training, interpreter, is_same
from tests.cluster.slurm import Slurm


@pytest.mark.requirement(
    "002-M1-2",
    "002-M2-1",
    "002-M2-2",
    "002-M2-3",
    "002-M3-3",
    "002-T-1",
    "002-T-6",
    "002-C-2",
    "004-SL-1",
    "004-3.1-4",
    "002-C-3",
)
@pytest.mark.parametrize(
    ("script", "options", "shown"),
    [
        ("train.sh", ["--cpus-per-task=2"], "One process on cpu"),
        ("train_distributed.sh", ["--cpus-per-task=1"], "2 processes on 2 machines, 2 threads"),
        ("train_distributed_multinode.sh", ["--cpus-per-task=1"], "4 processes on 4 machines"),
        ("train_distributed_gpu.sh",
         ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"],
         "2 processes on 2 machines"),
        ("train_mpirun.sh", ["--ntasks-per-node=1", "--gpus-per-node=1"],
         "2 processes on 2 machines"),
    ],
)  # fmt: skip
@pytest.mark.needs("mpirun")
def test_a_script_trains_the_same_run(
    slurm: Slurm, tmp_path: Path, untouched: RunRecord, script: str, options: list[str], shown: str
) -> None:
    training = Training.write(tmp_path)
    path = os.pathsep.join([str(interpreter[0].parent), os.environ["PATH"]])
    environment = {**training.environment, "PATH": path}
    done = slurm.run(
        ["sbatch", "--parsable", "--output=out.txt", *options, str(ROOT / "hpc" / script),
         str(tmp_path / "config.yaml"), f"run_dir={tmp_path / 'run'}",
         "--record", str(tmp_path / "run" / "record")],
        env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    output = tmp_path / "out.txt"
    assert slurm.wait(job) == "COMPLETED", output.read_text()
    assert shown in output.read_text()
    assert is_same(training.record("run"), untouched)


def test_a_script_without_a_config_prints_its_usage(slurm: Slurm, tmp_path: Path) -> None:
    done = slurm.run(
        ["sbatch", "--parsable", "--output=out.txt", "--cpus-per-task=1", str(ROOT / "hpc" / "train.sh")], cwd=tmp_path
    )
    assert slurm.wait(done.stdout.strip()) == "FAILED"
    assert "usage: sbatch hpc/train.sh CONFIG" in (tmp_path / "out.txt").read_text()
