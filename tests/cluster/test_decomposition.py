"""The decomposition recipe's job script by a real sbatch: four ranks of mpirun on two nodes are the run of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.processes import run, samestep
from tests.cluster.runs import ROOT, Training, interpreter
from tests.cluster.slurm import Slurm
from tests.recipes.decomposition.small import COMMON, CONFIG, RECIPE


def compared(*runs: Path) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, str(RECIPE / "compare.py"), *map(str, runs)], cwd=ROOT)


@pytest.mark.variation(
    "test_the_script_compares_mpirun_with_one_process, and for a job test_a_script_trains_the_same_run"
)
@pytest.mark.requirement("004-5.3-2", "004-5.2-3", "004-SL-1")
@pytest.mark.needs("mpirun")
def test_a_job_decomposes_on_two_nodes_as_on_one_process(slurm: Slurm, tmp_path: Path) -> None:
    training = Training.write(tmp_path)
    weights = {"linear1.weight": torch.eye(2, 5), "linear2.bias": torch.zeros(5)}
    files = tmp_path / "runs" / "tms_5-2-target" / "files"
    files.mkdir(parents=True)
    torch.save(weights, files / "target.pt")
    alone = samestep("train", CONFIG / "tms_5-2" / "single.yaml", *COMMON, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    path = os.pathsep.join([str(interpreter[0].parent), os.environ["PATH"]])
    done = slurm.run(
        ["sbatch", "--parsable", "--output=out.txt", str(RECIPE / "scripts" / "decompose.sh"),
         str(CONFIG / "tms_5-2" / "four.yaml"), *COMMON, f"launch.python={training.python}"],
        env={**training.environment, "PATH": path}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output = tmp_path / "out.txt"
    assert slurm.wait(done.stdout.strip()) == "COMPLETED", output.read_text()
    assert "4 processes on 2 machines" in output.read_text()
    same = compared(tmp_path / "runs" / "tms_5-2", tmp_path / "runs" / "tms_5-2-four")
    assert same.returncode == 0, same.stdout
