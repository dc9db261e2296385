"""Both stages of the metric learning recipe by mpirun on two hosts and by Slurm on two nodes: one run each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import samestep
from tests.cluster.runs import Training
from tests.cluster.slurm import Slurm
from tests.cluster.test_launching import run_on_ctl
from tests.recipes.small import COMMON, FIRST, SECOND, make_data


@pytest.mark.variation("test_the_recipe_from_images_to_results, which verifies both stages on one machine")
@pytest.mark.requirement("000-P3-6")
@pytest.mark.needs("mpirun")
def test_both_stages_are_one_run_under_mpirun_and_slurm(slurm: Slurm, tmp_path: Path) -> None:
    make_data(tmp_path)
    for words in (("train", FIRST, *COMMON), ("average", "runs/first", "--last", "1")):
        done = samestep(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    training = Training.write(tmp_path)
    for stage in (FIRST, SECOND):
        argv = [
            training.python, "-m", "samestep", "verify", str(stage), *COMMON,
            f"run_dir={tmp_path / stage.stem}", f"launch.python={training.python}", "--worlds",
            "1,2@mpirun,2@slurm", "--nodes", "2", "--hosts", "n1,n2", "--steps", "3", "--json",
        ]  # fmt: skip
        done_there = run_on_ctl(slurm.hosts, training, argv, slurm.env)
        assert done_there.returncode == 0, done_there.stdout + done_there.stderr
        worlds = json.loads(done_there.stdout)["worlds"]
        assert set(worlds) == {"1", "2 mpirun", "2 slurm"}
        assert len({world["state_hash"] for world in worlds.values()}) == 1
