"""Limits of control groups, by which containers and batch systems limit this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from samestep.parsing.numbers import whole_number


@dataclass(frozen=True)
class Limits:
    """None where there is no limit."""

    cpus: float | None
    """How many CPUs' time may be used."""
    memory: int | None
    """Bytes."""


def read_limits(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Limits:
    """Return the tightest limits of this process's groups and of all groups around them."""
    cpus, memory = [], []
    for folder in _groups(root, read_text(membership) or ""):
        quota, period = _numbers(folder, "cpu.max") or [*_old_quota(folder), 0, 0][:2]
        if period:
            cpus.append(quota / period)
        memory += _numbers(folder, "memory.max") or _numbers(folder, "memory.limit_in_bytes")
    return Limits(min(cpus, default=None), min(memory, default=None))


def read_text(path: Path) -> str | None:
    """Return a file of the kernel; None where this kernel or container has none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _groups(root: Path, membership: str) -> Iterator[Path]:
    """Yield the folders of lines such as '0::/job/step' and, in version 1, '4:cpu,cpuacct:/job'."""
    for line in membership.splitlines():
        _, kinds, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for top in (root / kinds, *(root / kind for kind in kinds.split(","))):
            yield from (top / folder for folder in (own, *own.parents))


def _numbers(folder: Path, name: str) -> list[int]:
    """Return a file's numbers; none if it is not there, or holds 'max' or -1, which is no limit."""
    words = (read_text(folder / name) or "").split()
    numbers = [number for word in words if (number := whole_number(word)) is not None]
    return numbers if len(numbers) == len(words) else []


def _old_quota(folder: Path) -> list[int]:
    quota, period = (_numbers(folder, f"cpu.cfs_{which}_us") for which in ("quota", "period"))
    return [*quota, *period] if quota else []
