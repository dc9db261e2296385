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
from tests.installed import path_without_components

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER in item.path.parents:  # pytest calls this with the items of all folders
            item.add_marker(pytest.mark.cluster)
            if _names_components(item):
                item.add_marker(pytest.mark.components)


def _names_components(item: pytest.Item) -> bool:
    fixtures: tuple[str, ...] = getattr(item, "fixturenames", ())
    return not {"slurm", "sshd"}.isdisjoint(fixtures) or item.get_closest_marker("needs") is not None


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where hosts cannot be made: for tests that make their own."""
    if reason := hosts_module.why_impossible():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def hosts(namespaces: None) -> Iterator[Hosts]:
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


@pytest.fixture(scope="session")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return path_without_components(tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True)
def only_named_components(whole_cluster: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that names no component finds none: it must pass where none is installed.

    After `whole_cluster`, which repairs Slurm with its own programs when the test is over.
    """
    if request.node.get_closest_marker("components") is None:
        monkeypatch.setenv("PATH", request.getfixturevalue("bare_path"))


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
