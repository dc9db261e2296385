"""Limits of containers and batch systems, in both versions of control groups."""

from __future__ import annotations

from pathlib import Path

from samestep.environment.hardware import Limits, read_limits


def test_limits_of_groups_of_both_versions_are_found(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def limits(membership: str) -> Limits:
        write("membership", membership)
        return read_limits(tmp_path / "groups", tmp_path / "membership")

    write("groups/job/step/cpu.max", "max 100000\n")
    write("groups/job/step/memory.max", "max\n")
    assert limits("0::/job/step") == Limits(None, None)
    write("groups/job/cpu.max", "250000 100000\n")  # of the group around it
    write("groups/job/memory.max", "1000\n")
    assert limits("0::/job/step") == Limits(2.5, 1000)
    assert limits("0::/") == Limits(None, None)
    write("groups/cpu/old/cpu.cfs_quota_us", "200000\n")
    write("groups/cpu/old/cpu.cfs_period_us", "100000\n")
    write("groups/memory/old/memory.limit_in_bytes", "2000\n")
    assert limits("4:cpu,cpuacct:/old\n3:memory:/old\n") == Limits(2.0, 2000)
    write("groups/cpu/old/cpu.cfs_quota_us", "-1\n")
    assert limits("4:cpu,cpuacct:/old\n") == Limits(None, None)
    assert read_limits(tmp_path / "none", tmp_path / "none") == Limits(None, None)


def test_the_tightest_limit_of_all_groups_counts(tmp_path: Path) -> None:
    for folder, quota in (("a", 300), ("a/b", 100), ("a/b/c", 200)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "cpu.max").write_text(f"{quota} 100")
        (tmp_path / folder / "memory.max").write_text(str(quota))
    (tmp_path / "membership").write_text("0::/a/b/c\n")
    assert read_limits(tmp_path, tmp_path / "membership") == Limits(1.0, 100)
