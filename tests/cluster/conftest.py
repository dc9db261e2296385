"""One cluster for all tests of this folder, whole again after each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.train.record import RunRecord
from tests.cluster import hosts as hosts_module
from tests.cluster import runs
from tests.cluster import slurm as slurm_module
from tests.cluster import sshd as sshd_module
from tests.cluster.hosts import Hosts
from tests.cluster.interpreters import Interpreters
from tests.cluster.runs import Training
from tests.cluster.slurm import Slurm
from tests.cluster.sshd import Sshd

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER in item.path.parents:  # pytest calls this with the items of all folders
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    if reason := hosts_module.why_impossible():
        pytest.skip(reason)
    with Hosts(4) as started, Interpreters(started) as interpreters:
        runs.interpreter.append(interpreters.python)
        yield started
        runs.interpreter.clear()


@pytest.fixture(scope="session")
def slurm(hosts: Hosts) -> Iterator[Slurm]:
    if reason := slurm_module.why_impossible():
        pytest.skip(reason)
    with Slurm(hosts) as started:
        yield started


@pytest.fixture(scope="session")
def sshd(hosts: Hosts) -> Iterator[Sshd]:
    if reason := sshd_module.why_impossible():
        pytest.skip(reason)
    with Sshd(hosts) as started:
        yield started


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The run that every other one must be: one process, on no cluster."""
    training = Training.write(tmp_path_factory.mktemp("untouched"))
    argv = training.command("train", f"run_dir={training.folder / 'run'}", "--record",
                            training.folder / "run" / "record")  # fmt: skip
    environment = {**os.environ, **training.environment}
    subprocess.run(argv, env=environment, cwd=training.folder, check=True, capture_output=True)
    return training.record("run")


@pytest.fixture(autouse=True)
def whole_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that failed half-way must not spoil the next."""
    if "hosts" not in request.fixturenames:
        yield
        return
    hosts: Hosts = request.getfixturevalue("hosts")
    running = hosts.running()
    yield
    hosts.repair(keep=running)
