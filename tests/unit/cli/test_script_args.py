from __future__ import annotations

from pathlib import Path

import pytest

from samestep.cli.script_args import split_args

OPTIONS = {"--nproc": True, "--print": False, "-m": False, "--time": True}


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text("import samestep\nsamestep.start()")
    Path("plain.py").write_text("import torch")


@pytest.mark.parametrize(
    ("words", "ours", "arguments"),
    [
        ("--nproc 2 plain.py --lr 1", "--nproc 2 plain.py", "--lr 1"),
        ("--nproc=2 plain.py --time 1 --nproc 3", "--nproc=2 plain.py", "--time 1 --nproc 3"),
        ("plain.py --nproc 2 --lr 1 --print", "plain.py --nproc 2", "--lr 1 --print"),
        ("plain.py epochs=1", "plain.py", "epochs=1"),
        ("--print plain.py a -- b", "--print plain.py", "a -- b"),
        ("--print plain.py -- --time 5 -- b", "--print plain.py", "--time 5 -- b"),
        ("plain.py -- --nproc 2", "plain.py", "--nproc 2"),
        ("-m package.train --lr 1", "-m package.train", "--lr 1"),
        ("--nproc 2 -m package.train -- --nproc 3", "--nproc 2 -m package.train", "--nproc 3"),
        ("run.py epochs=1 --nproc 2 --lr 1", "run.py epochs=1 --nproc 2", "--lr 1"),
        ("--nproc 2 run.py epochs=1", "--nproc 2 run.py", "epochs=1"),
        ("--nproc 2 run.py epochs=1 -- two", "--nproc 2 run.py epochs=1", "two"),
        ("plain.py", "plain.py", ""),
        ("plain.py --nproc", "plain.py --nproc", ""),
    ],
)
def test_words_are_ours_or_the_scripts(words: str, ours: str, arguments: str) -> None:
    found = split_args(words.split(), OPTIONS, takes_any=True)
    assert found == (ours.split(), tuple(arguments.split()))


@pytest.mark.parametrize(
    "words", ["config.yaml --nproc 2", "--nproc out.py config.yaml", "--wrong plain.py", "-- plain.py", ""]
)
def test_a_command_line_without_a_script(words: str) -> None:
    assert split_args(words.split(), OPTIONS, takes_any=True) is None


def test_where_only_runs_are_taken_an_override_is_ours() -> None:
    found = split_args(["plain.py", "epochs=1", "--lr", "1"], OPTIONS)
    assert found == (["plain.py", "epochs=1"], ("--lr", "1"))
