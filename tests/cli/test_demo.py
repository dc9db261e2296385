"""`samestep demo`: the promise, on real ranks, with a real kill."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.processes import samestep


def test_four_runs_are_one_and_plain_ddp_is_not(tmp_path: Path) -> None:
    """Its ranks are forks of the command, so that it takes half a minute on two cores."""
    done = samestep("demo", "mine", "--json", cwd=tmp_path, cold="it forks its own ranks")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours = [run for run in found["runs"] if run["by"] == "samestep"]
    plain = [run for run in found["runs"] if run["by"] == "plain DDP"]
    assert found["same"] is True
    assert len({(run["state"], tuple(run["losses"])) for run in ours}) == 1
    assert ours[-1]["run"] == "4 ranks, one killed at step 48, then 2"
    assert ours[-1]["resumed_at"] == 49, "of the step that the survivors saved"
    assert len({run["state"] for run in plain}) == len(plain) == 3
    assert all(len(run["losses"]) == 96 for run in found["runs"])
    page = (tmp_path / found["page"]).read_text()
    assert "samestep: 4 runs, 1 final state" in page
    assert (tmp_path / "mine" / "task.py").exists()
    again = samestep("demo", "mine", cwd=tmp_path)
    assert again.returncode == 2
    assert "--force" in again.stderr


def test_a_folder_of_the_users_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("a year")
    done = samestep("demo", "mine", "--force", cwd=tmp_path)
    assert done.returncode != 0
    assert "mine" in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
