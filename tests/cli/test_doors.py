"""What a stranger's folder, config, terminal text or neighbour on the machine can do to this user: nothing."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.files import write_whole
from samestep.checkpoint.ownership import claim
from samestep.checkpoint.run_result import RunResult, write_result
from samestep.config import load_config
from samestep.distributed.health.watchdog import Reminder
from samestep.errors import ConfigError, LaunchError, RunDirError, TextError
from samestep.launch.run.mpirun import find_flavour
from samestep.parsing.files import read_text
from samestep.parsing.limits import visible
from samestep.run.open_run import Opened
from samestep.run.run_dir import RunDir
from tests.cli.processes import TASKS, samestep


def test_a_strangers_sweep_connects_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "theirs"
    folder.mkdir(parents=True)
    document = {
        "name": "theirs", "base": str(tmp_path / "base.yaml"), "space": {"params.lr": [0.1, 0.2]},
        "storage": "mysql+pymysql://${USER}:${HOME}@127.0.0.1:9/db?local_infile=1", "signature": "x",
        "objective": {"metric": "val_loss", "mode": "min"}, "trials": 1,
    }  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(document))
    (folder / "storage.json").write_text(json.dumps({"storage": "mysql://h/db", "study": "1"}))
    for words in (("show",), ("sweep", "best"), ("plot",)):
        done = samestep(*words, str(folder), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "would connect with your user and your variables" in done.stderr
        assert os.environ["HOME"] not in done.stderr


MARKUP = "[/pytorch/x.cpp:3] [a-z]+_[0-9] [red]\x1b[2Jgone\x07"


def test_text_from_a_run_is_shown_as_it_is_and_obeyed_by_no_terminal(tmp_path: Path) -> None:
    result = RunResult("failed", MARKUP, metrics={"[bold]f1[/bold]": 0.5})
    claim(tmp_path / "run")
    write_result(tmp_path / "run", result)
    done = samestep("show", "run", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    joined = "".join(line.strip("│┃ ") for line in done.stdout.splitlines()).replace(" ", "")
    for part in ("[/pytorch/x.cpp:3]", "[a-z]+_[0-9]", "[red]", "\\x1b[2Jgone\\x07", "[bold]f1[/bold]"):
        assert part in joined
    assert "\x1b[2J" not in done.stdout


def test_control_characters_are_shown_as_escapes() -> None:
    assert visible("a\tb\nc ü") == "a\tb\nc ü"
    assert visible("\x1b]0;x\x07\u009b\u202e") == "\\x1b]0;x\\x07\\x9b\\u202e"


def test_links_and_pipes_in_a_run_directory_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    run_dir = claim(tmp_path / "run")
    for name in ("config.json", "metrics.jsonl", "run.lock", "result.json"):
        (run_dir / name).symlink_to(victim)
        with pytest.raises(RunDirError, match=f"{name} is a link to"):
            RunDir(run_dir)
        (run_dir / name).unlink()
    (run_dir / "config.json.partial").symlink_to(victim)
    opened = RunDir(run_dir)
    write_whole(run_dir / "config.json", "{}")
    opened.close()
    assert victim.read_text() == "mine"
    os.mkfifo(run_dir / "origin.json")
    with pytest.raises(TextError, match="it is a pipe, not a file"):
        read_text(run_dir / "origin.json")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_the_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = claim(tmp_path / "theirs")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder != Path("/") and folder.stat().st_mode & 0o5 != 0o5:
            folder.chmod(0o755)
    theirs.chmod(0o777)
    os.seteuid(65534)
    try:
        with pytest.raises(RunDirError, match="belongs to another user"):
            claim(theirs)
    finally:
        os.seteuid(0)


def test_settings_that_may_hold_a_secret_are_for_their_owner(tmp_path: Path) -> None:
    for name, params in {"open": {"width": 3}, "private": {"api_token": "hunter2"}}.items():
        values = {
            "task": f"{TASKS}:Everything", "epochs": 1, "global_batch": 8, "run_dir": str(tmp_path / name),
            "params": params,
        }  # fmt: skip
        config = load_config(values)
        opened: Any = Opened.__new__(Opened)
        opened.__dict__.update(
            _accepted=False, point=None, _adopted={}, _origin=None, _config=config, run_dir=RunDir(config.run_path)
        )
        opened.accept()
        opened.run_dir.close()
        mode = (tmp_path / name / "config.json").stat().st_mode & 0o077
        assert bool(mode) == (name == "open")
        assert bool((tmp_path / name).stat().st_mode & 0o077) == (name == "open")


def test_a_password_in_a_trackers_address_is_refused(tmp_path: Path) -> None:
    base = {"task": "t.py:T", "epochs": 1, "global_batch": 8}
    with pytest.raises(ConfigError) as caught:
        load_config({**base, "trackers": {"mlflow": {"uri": "https://me:hunter2@host/x"}}})
    assert "trackers.mlflow.uri" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    load_config({**base, "trackers": {"mlflow": {"uri": "https://me:${PW}@host/x"}}})


def test_showing_a_launch_runs_nothing_that_the_config_names(tmp_path: Path) -> None:
    program = tmp_path / "mympirun"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/pwned\necho Open MPI\n")
    program.chmod(0o755)
    with pytest.raises(LaunchError, match="--print runs nothing that a config names"):
        find_flavour(str(program), may_run=False)
    assert not (tmp_path / "pwned").exists()
    (tmp_path / "mpiexec.hydra").symlink_to(program.rename(tmp_path / "mpiexec.hydra-4.0"))
    assert find_flavour(str(tmp_path / "mpiexec.hydra"), may_run=False) == "hydra"
    assert not (tmp_path / "pwned").exists()


def test_paths_that_cannot_be_are_mistakes_and_not_tracebacks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (("bench", "all", "--output", "file"), ("bench", "all", "--output", "file/x")):
        done = samestep(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
    with pytest.raises(RunDirError, match="File name too long"):
        claim(Path("x" * 6000))
    home = load_config({"epochs": 1, "run_dir": "~/x"}).run_path
    assert home == Path.home() / "x"


def test_what_takes_long_is_reported_with_its_stack() -> None:
    told: list[str] = []
    heard = threading.Event()

    def report(text: str) -> None:
        told.append(text)
        heard.set()

    def slow_hook() -> None:
        assert heard.wait(60)

    with Reminder("on_end", 0.3, report):
        slow_hook()
    assert told[0].startswith("on_end has taken 0 s so far")
    assert "slow_hook" in told[0]
