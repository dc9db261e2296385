"""samestep bench on other machines than its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.runs import PATIENCE, TASKS, Training, by_rsh
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import Sshd
from tests.variations import variations


@pytest.mark.requirement("000-V-3")
@pytest.mark.parametrize("via", variations(["ssh", "slurm", "mpirun"], kept=["mpirun"]))
@pytest.mark.needs("mpirun")
def test_scaling_on_two_machines(via: str, sshd: Sshd, slurm: Slurm, tmp_path: Path) -> None:
    training = Training.write(tmp_path, task=f"{TASKS}:Everything", global_batch=16, lanes=2)
    # Over ssh no variable travels but those that the config names.
    variables = [f"launch.environment.{k}={v}" for k, v in training.environment.items()]
    words = {
        "ssh": ("--hosts", "n1,n2", f"launch.ssh=ssh -F {sshd.config}", *variables),
        "slurm": ("--nodes", "2"),
        "mpirun": ("--hosts", "n1,n2"),
    }[via]
    argv = [
        training.python, "-m", "samestep", "bench", "scaling", "config.yaml", "--worlds", "2", "--mode", "strong", "--quick", "--via", via, "--output",
        "scaling.json", *words,
    ]  # fmt: skip
    environment = {**training.environment, **slurm.env, **by_rsh(sshd.hosts)}
    done = sshd.hosts.run("ctl", argv, cwd=tmp_path, timeout=PATIENCE, env=environment, light=via == "mpirun")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert found["machine"]["hosts"] == ["n1", "n2"]
    rows = {row["variant"]: row for row in found["rows"]}
    assert rows.keys() == {"samestep", "ddp"}
    assert [one["host"] for one in rows["samestep"]["ranks"]] == ["n1", "n2"]
    assert not list(tmp_path.glob("samestep-measuring-*")), "it leaves nothing behind"
