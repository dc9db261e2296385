"""Curves of runs that were really trained, by the command as a person types it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from tests.cli.processes import samestep, write_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was stopped and resumed, and another one of the same name."""
    folder = tmp_path_factory.mktemp("plot")
    evaluation = {"every_epochs": None, "every_steps": 3}
    config = write_config(folder / "small.yaml", name="mine", steps=6, log_every=2, evaluation=evaluation)
    for run, steps in (("a", ["--stop-after", "4"]), ("a", []), ("b", ["seed=7"])):
        done = samestep("train", config, f"run_dir={run}/mine", *steps, cwd=folder)
        assert done.returncode in (0, 75), done.stderr
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change."""
    for name in ("a", "b"):
        shutil.copytree(trained / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plot(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plot", *words])
    return done.exit_code, done.stdout, done.stderr


def test_two_runs_as_a_table_a_picture_and_a_page(folder: Path) -> None:
    done = samestep("plot", "a/mine", "b/mine", "--picture", "out/c.png", "--report", "out/c.html", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["Plot: out/c.png", "Page: out/c.html"]
    for text in ("a/mine", "b/mine", "loss", "val_loss", "lr", "samples_per_second"):
        assert text in done.stdout
    assert (folder / "out" / "c.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "out" / "c.html").read_text(encoding="utf-8")
    assert len(page) < 60_000
    config = samestep("plot", "a/mine", "--json", cwd=folder)
    facts = json.loads(config.stdout)["runs"]["mine"]["facts"]
    for name in ("config", "device", "threads per rank", "trained with"):
        assert facts[name] in page


def test_scripts_get_each_value_to_the_bit_also_of_a_resumed_run(folder: Path) -> None:
    code, out, _ = plot("a/mine", "--json", "--metric", "loss")
    loss = json.loads(out)["runs"]["mine"]["metrics"]["loss"]
    rows = [json.loads(line) for line in (folder / "a/mine/metrics.jsonl").open(encoding="utf-8")]
    assert code == 0
    assert loss["steps"] == list(range(6))
    assert loss["values"] == [row["loss"] for row in rows if "loss" in row]
    assert loss["summary"]["best"] == min(loss["values"])


def test_lines_that_are_lost_are_counted_and_an_empty_run_is_named(folder: Path) -> None:
    path = folder / "a/mine/metrics.jsonl"
    path.write_text("garbage\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "b/mine/metrics.jsonl").write_text("")
    code, _, err = plot("a/mine", "b/mine")
    assert code == 0
    assert "a/mine: 1 line(s) hold no row of numbers" in err
    assert "b/mine: no numbers yet" in err
    assert plot("b/mine")[0] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "a/metrics.jsonl cannot be read: No such file or directory. Give the runs in it: a/mine"),
        (["none"], "Give a run's directory"),
        (["a/mine", "--metric", "zzz"], "no run has a metric 'zzz': there are epoch, loss, "),
        (["a/mine", "--picture", "c.gif"], "end its name in .png, .svg, .pdf"),
        (["a/mine", "--picture", "theirs.png"], "theirs.png exists already: --force replaces it"),
        (["a/mine", "--report", "theirs.html"], "is no page of samestep: --force replaces it, or name another file"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(folder: Path, words: list[str], message: str) -> None:
    for name in ("theirs.png", "theirs.html"):
        (folder / name).write_text("theirs")
    code, out, err = plot(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert {path.name for path in folder.iterdir()} == {"a", "b", "theirs.png", "theirs.html"}
    assert (folder / "theirs.png").read_text() == (folder / "theirs.html").read_text() == "theirs"


def test_force_replaces(folder: Path) -> None:
    for name in ("c.png", "c.html"):
        (folder / name).write_text("theirs")
    assert plot("a/mine", "--picture", "c.png", "--report", "c.html", "--force")[0] == 0
    assert (folder / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "samestep" in (folder / "c.html").read_text(encoding="utf-8")


def test_without_matplotlib_there_is_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = plot("a/mine", "--picture", "c.png")
    assert code == 0
    assert "val_loss" in out
    assert "No plot: " in err
    assert "pip install '.[plots]'" in err
    assert not (folder / "c.png").exists()


def test_names_from_a_file_are_no_markup_and_no_control_characters(folder: Path) -> None:
    row = {"step": 0, "[red]a": 1.0, "\x1b[31mb": 2.0}
    (folder / "b/mine/metrics.jsonl").write_text(json.dumps(row) + "\n")
    _, out, _ = plot("b/mine")
    assert "[red]a" in out
    assert "\\x1b[31mb" in out
    assert "\x1b" not in out
