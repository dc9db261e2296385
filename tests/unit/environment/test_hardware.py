"""CPUs that belong to this process, and where it runs."""

from __future__ import annotations

import os

import pytest

from samestep.environment import hardware
from samestep.environment.fact import Fact
from samestep.environment.hardware import Limits, allowed_cpus, cpu_limit, detect_platform, owned_cpus


@pytest.mark.requirement("001-S5-1")
@pytest.mark.parametrize(
    ("environ", "platform"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "kaggle"),
        ({"COLAB_RELEASE_TAG": "release-colab_20250101"}, "colab"),
        ({"COLAB_GPU": "1"}, "colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_GPU": "0"}, "kaggle"),
        ({}, "local"),
    ],
)
def test_the_platform_is_known_by_its_variables(environ: dict[str, str], platform: str) -> None:
    found = detect_platform(environ)
    assert found.value == platform
    assert found.reason


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """What the container allows, in the test's hands; the process may run on 8 CPUs."""
    found: dict[str, float | None] = {"cpus": None}
    monkeypatch.setattr(hardware, "read_limits", lambda: Limits(found["cpus"], None))
    monkeypatch.setattr(hardware, "allowed_cpus", lambda: tuple(range(8)))
    return found


@pytest.mark.parametrize(
    ("quota", "environ", "cpus", "reason"),
    [
        (None, {}, 8, "CPUs this process may run on"),
        (2.5, {}, 2, "container"),
        (0.5, {}, 1, "container"),
        (16.0, {}, 8, "CPUs this process may run on"),
        (None, {"SLURM_CPUS_ON_NODE": "3"}, 3, "SLURM_CPUS_ON_NODE=3"),
        (2.0, {"SLURM_CPUS_ON_NODE": "3"}, 2, "container"),
        (None, {"SLURM_CPUS_ON_NODE": "3", "OMPI_COMM_WORLD_RANK": "0"}, 8, "may run on"),
        (None, {"SLURM_CPUS_ON_NODE": "3(x2)"}, 8, "may run on"),
    ],
)
def test_the_tightest_limit_counts_and_is_named(
    limits: dict[str, float | None], quota: float | None, environ: dict[str, str], cpus: int, reason: str
) -> None:
    limits["cpus"] = quota
    found = owned_cpus(environ)
    assert found.value == cpus
    assert reason in found.reason


def test_without_a_limit_there_is_none(limits: dict[str, float | None]) -> None:
    assert cpu_limit({}) is None
    limits["cpus"] = 100.0
    assert cpu_limit({}) == Fact(100, "CPUs of the container's limit")


def test_cpus_are_those_of_the_affinity_or_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 1}, raising=False)
    assert allowed_cpus() == (1, 5)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert allowed_cpus() == (0, 1, 2)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert allowed_cpus() == (0,)
