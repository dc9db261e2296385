"""samestep bench checkpoint as a person types it, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.processes import samestep


def test_one_and_two_ranks_save_and_restore_each_others(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "mine").write_text("")
    done = samestep(
        "bench", "checkpoint", "--worlds", "1,2", "--directory", "disk", "--megabytes", "1",
        "--rounds", "3", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    restored = {(row["world"], row["saved_by"]) for row in rows if row["action"] == "restore"}
    assert restored == {(1, 1), (2, 1), (2, 2)}
    for world in (1, 2):
        took = {row["action"]: row for row in rows if row["world"] == world}
        assert took["pause"]["median"] < took["save"]["median"]
        assert took["save"]["bytes"] == took["restore"]["bytes"]
        assert abs(took["save"]["bytes"] - 1e6) < 2e5
        assert abs(took["torch.save"]["bytes"] - 1e6) < 2e5
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["disk", "disk/mine"]


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = samestep("bench", "checkpoint", "--worlds", "1", "--directory", "no", cwd=tmp_path)
    assert done.returncode == 2
    assert "--directory is no, and no folder can be made in it" in " ".join(done.stderr.split())
