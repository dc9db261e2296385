"""The plain scripts: usage, arguments, and real ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.processes import write_config
from tests.preloaded.client import ROOT, environment, shell_path

SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
RECIPES = sorted((ROOT / "recipes").glob("*/scripts/*.sh"))
ALL = [*SCRIPTS, *sorted((ROOT / "hpc").glob("*.sh")), *RECIPES, ROOT / "tests" / "cluster" / "install.sh"]


def run(script: str, *arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / script, *arguments], cwd=cwd,
        env={**environment(), "PATH": shell_path()},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    values = {"epochs": 1, "lanes": 4, "name": "run", "distributed": {"device": "cpu"}}
    return write_config(tmp_path / "my config.yaml", **values)


@pytest.mark.parametrize("script", ALL, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (tests/cluster/install.sh)")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert os.access(script, os.X_OK)


@pytest.mark.requirement("003-T3-9")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_is_the_comment_at_the_top(script: Path, tmp_path: Path) -> None:
    done = run(script.name, "--help", cwd=tmp_path)
    assert done.returncode == 0
    trains = script.name.startswith("train_")
    assert done.stdout.startswith("Train on " if trains else "Everything that ")
    arguments = "--config FILE" if trains else "[FOLDER]"
    assert f"Usage: scripts/{script.name} {arguments}" in done.stdout
    assert "#" not in done.stdout
    assert "set -euo" not in done.stdout


@pytest.mark.requirement("003-T3-6")
@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("train_dist_torchrun.sh", [], "--config is missing"),
        ("train_dist_torchrun.sh", ["--num_gpus"], "--num_gpus needs a value"),
        ("train_dist_launch.sh", ["--gpus", "4"], "unknown option --gpus"),
        ("train_dist_launch.sh", ["--config", "x", "y"], "unexpected argument y"),
        ("train_multinode.sh", ["--config", "x", "--nnodes", "2"], "--node_rank is missing"),
        ("train_multinode.sh", ["--config", "x", "--master_addr"], "--master_addr needs a value"),
        ("train_multinode.sh", ["-x"], "unknown option -x"),
        ("train_dist_torchrun.sh", ["--config", "no.yaml"], "no.yaml"),
        ("train_dist_torchrun.sh", ["--config", "{config}", "--num_gpus", "x"], "--nproc is 'x'"),
    ],
)
def test_a_mistake_is_reported_in_a_line(
    script: str, arguments: list[str], message: str, tmp_path: Path, config: Path
) -> None:
    done = run(script, *(word.format(config=config) for word in arguments), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.requirement("003-T3-1", "003-T3-2", "003-T3-5", "003-SC-3")
@pytest.mark.parametrize("script", ["train_dist_torchrun.sh", "train_dist_launch.sh"])
def test_ranks_of_this_machine(script: str, tmp_path: Path, config: Path) -> None:
    done = run(script, "--num_gpus", "2", "--config", config, "seed=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 processes on 1 machine" in done.stderr
    assert (tmp_path / "runs" / "run" / "model.safetensors").exists()


@pytest.mark.requirement("003-T3-3", "003-T3-4")
def test_machines_by_hand_pass_everything_on(tmp_path: Path, config: Path) -> None:
    done = run(
        "train_multinode.sh", "--config", config, "--nnodes=2", "--node-rank", "1",
        "--master_addr", "gpu01", "--master_port", "29511", "--num_gpus", "2", "seed=4",
        "name=two words", "--", "--print",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    for words in ("--nnodes=2", "--node-rank=1", "--master-addr=gpu01", "--master-port=29511",
                  "--nproc-per-node=2", "seed=4", "'name=two words'", f"'{config}'"):  # fmt: skip
        assert words in line
