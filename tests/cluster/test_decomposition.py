"""The decomposition recipe's job script by a real sbatch: four ranks of mpirun on two nodes are the run of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.processes import run, samestep
from tests.cluster.runs import ROOT, Training
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
    script, config = RECIPE / "scripts" / "decompose.sh", CONFIG / "tms_5-2" / "four.yaml"
    words = (script, config, *COMMON, f"launch.python={training.python}")
    state, output = slurm.run_script(tmp_path, *words, **training.environment)
    assert state == "COMPLETED", output
    assert "4 processes on 2 machines" in output
    same = compared(tmp_path / "runs" / "tms_5-2", tmp_path / "runs" / "tms_5-2-four")
    assert same.returncode == 0, same.stdout
