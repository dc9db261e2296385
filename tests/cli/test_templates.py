"""samestep init --template: configs for kinds of machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.cli.starter.templates import TEMPLATES
from samestep.config import load_config
from tests.cli.processes import samestep
from tests.distributed.running import rows_of


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def here(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_they_are_listed_with_their_commands() -> None:
    shown = here("init", "--list")
    assert list(TEMPLATES) == ["one-gpu", "one-node", "two-nodes", "cpu-cluster", "kaggle"]
    for name in TEMPLATES:
        assert f"│ {name} " in shown
    assert "samestep launch CONFIG" in shown


@pytest.mark.requirement("000-P5-6", "003-T4-2", "004-4.2-2")
@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("one-gpu", 2, ["--nproc-per-node=2"]),
        ("one-node", 2, ["--nproc-per-node=2"]),
        ("two-nodes", 8, ["#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4", "srun"]),
        ("cpu-cluster", 4, ["#SBATCH --nodes=4", "#SBATCH --cpus-per-task=40", "srun"]),
        ("kaggle", 2, ["--nproc-per-node=2"]),
    ],
)
def test_each_is_a_config_with_a_plan(name: str, ranks: int, words: list[str]) -> None:
    written = here("init", name, "--template", name)
    for command in TEMPLATES[name].shown_commands(f"{name}/config.yaml"):
        assert f"now: {command}\n" in written
    assert json.loads(here("show", f"{name}/config.yaml", "--json"))["lanes"]["value"] == 8
    # How many a machine starts by itself depends on its GPUs and CPUs.
    size = [] if ranks > 2 else ["--nproc", "2"]
    plan = here("launch", f"{name}/config.yaml", *size, "--print")
    for word in words:
        assert word in plan
    assert f"│ ranks                 │ {ranks} " in plan


@pytest.mark.requirement("001-S5-2", "001-G-4", "001-T-5")
def test_kaggles_own_file_counts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    here("init", "mine", "--template", "kaggle")
    config = Path("mine/config.yaml")
    assert load_config(config).distributed.world_size == "auto"
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    there = load_config(config)
    assert (there.distributed.world_size, there.distributed.backend) == ("auto", "auto")
    assert there.precision == "fp16"


def test_what_is_wrong_is_named_and_nothing_written(tmp_path: Path) -> None:
    for words, message in (
        (["init"], "give a folder"),
        (["init", "mine", "--template", "laptop"], "there is no template laptop"),
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2
        assert message in done.stderr
    (tmp_path / "kaggle.yaml").write_text("mine")
    assert CliRunner().invoke(app, ["init", ".", "--template", "kaggle"]).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kaggle.yaml"]


@pytest.mark.requirement("004-4.1-4")
def test_they_train_the_same_run_here(tmp_path: Path) -> None:
    """Those with the most of their own; the others differ in what only their launcher reads."""
    losses = []
    for name in ("one-gpu", "one-node", "cpu-cluster"):
        here("init", name, "--template", name)
        start = ["launch", "--nproc", "2"] if name == "one-node" else ["train"]
        overrides = ["steps=4", "epochs=null", "distributed.threads_per_rank=1"]
        done = samestep(start[0], f"{name}/config.yaml", *start[1:], *overrides, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append([row.get("loss") for row in rows_of(tmp_path / "runs" / name)])
    assert losses[0]
    assert all(found == losses[0] for found in losses)
