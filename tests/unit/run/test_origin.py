"""Whose code a run's directory may run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.checkpoint.ownership import claim
from samestep.cli import app
from samestep.config import load_config
from samestep.environment.secret import key_path, make_key, read_key
from samestep.errors import LaunchError, NotTrusted
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.recorded import VARIABLE, RecordedCommand
from samestep.launch.commands.size import parse_hosts
from samestep.launch.commands.ssh import ssh_commands
from samestep.run.origin import ORIGIN, Origin, refuse_untrusted_task, resume_line, started_by
from samestep.run.run_dir import config_of

TASK = """
from pathlib import Path
Path({ran!r}).touch()
import samestep
class Mine(samestep.Task): ...
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def a_run(folder: Path, task: Path, command: RecordedCommand | None = None) -> Path:
    """A run's directory, as one that was started there leaves it."""
    claim(folder, "checkpoints")
    task.write_text(TASK.format(ran=str(folder.parent / "ran")))
    config = load_config({"task": f"{task}:Mine", "epochs": 1, "global_batch": 8, "name": "mine"})
    document = config.model_dump_json()
    (folder / "config.json").write_text(document)
    with started_by(command):
        (folder / ORIGIN).write_text(Origin.of(config).text(document))
    return folder


def check(run: Path, *overrides: str, trust: bool = False) -> None:
    refuse_untrusted_task(run, config_of(run, overrides), overrides, trust)


def test_a_run_of_mine_needs_no_word(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", tmp_path / "task.py")
    check(run)
    run.rename(tmp_path / "moved")
    check(tmp_path / "moved")


def test_a_task_inside_the_run_is_not_trusted(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", tmp_path / "run" / "task.py")
    with pytest.raises(NotTrusted) as caught:
        check(run)
    assert f"would run the class Mine of {run / 'task.py'}" in str(caught.value)
    assert "it lies inside the run's directory" in str(caught.value)
    check(run, trust=True)
    (tmp_path / "link.py").symlink_to(run / "task.py")
    with pytest.raises(NotTrusted, match="inside the run's directory"):
        check(run, f"task={tmp_path / 'link.py'}:Mine")


def test_an_edited_task_says_so(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", tmp_path / "task.py")
    (tmp_path / "task.py").write_text("# edited")
    with pytest.raises(NotTrusted, match="not what the run was started with"):
        check(run)
    check(run, f"task={tmp_path / 'task.py'}:Mine")  # who names it wants it


def test_a_directory_of_another_user_is_not_trusted_though_all_else_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    run = a_run(tmp_path / "run", tmp_path / "task.py")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    with pytest.raises(NotTrusted, match="the run was not started by you"):
        check(run)  # without a key
    make_key()
    with pytest.raises(NotTrusted, match="the run was not started by you"):
        check(run)


def test_a_strangers_network_variables_are_not_set(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", tmp_path / "task.py")
    text = (run / "config.json").read_text()
    evil = '"network":{"NCCL_NET_PLUGIN":"/evil.so"}'
    (run / "config.json").write_text(text.replace('"network":{}', evil))
    named = f"task={tmp_path / 'task.py'}:Mine"
    with pytest.raises(NotTrusted, match=r"NCCL_NET_PLUGIN in distributed\.network"):
        check(run, named)
    check(run, named, "distributed.network={}")
    check(run, named, trust=True)


@pytest.mark.parametrize("change", ["task", "code", "sha256", "signature", "command", "gone", "junk"])
def test_nothing_of_the_record_can_be_changed(tmp_path: Path, change: str) -> None:
    run = a_run(tmp_path / "run", tmp_path / "task.py")
    (tmp_path / "other.py").write_text("other")
    record = run / ORIGIN
    document = json.loads(record.read_text())
    if change == "task":
        text = (run / "config.json").read_text()
        (run / "config.json").write_text(text.replace("task.py", "other.py"))
    elif change == "gone":
        record.unlink()
    elif change == "junk":
        record.write_text("[" * 100_000)
    else:
        other = {"code": str(tmp_path / "other.py"), "command": {"verb": "launch"}}
        record.write_text(json.dumps({**document, change: other.get(change, "0" * 64)}))
        if change == "command":
            return check(run)  # what is no command is none, as before
    with pytest.raises(NotTrusted):
        check(run)


@pytest.mark.parametrize(
    "words",
    [["predict", "run", "valid", "--output", "p.csv"], ["predict", "run", "valid", "--embeddings", "--output", "z.npy"],
     ["export", "run"], ["average", "run"], ["plot", "run", "--embeddings"],
     ["resume", "run"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_no_command_runs_a_strangers_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    command = RecordedCommand("train", "config.yaml", str(tmp_path))
    a_run(Path("run"), tmp_path / "run" / "task.py", command)
    monkeypatch.setattr("samestep.models.trained_model.select_checkpoint", lambda *_: _Found)
    monkeypatch.setattr("samestep.models.trained_model.verify_checkpoint", lambda _: None)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert "is not trusted: it lies inside the run's directory" in done.output
    assert not (tmp_path / "ran").exists()


class _Found:
    step, folder = 1, Path("run")


def test_a_key_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    assert read_key() is None
    key = make_key()
    assert key is not None
    assert make_key() == read_key() == key
    assert key_path().stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key_path().parent.iterdir()] == ["key"]


def test_without_a_place_for_a_key_nothing_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = a_run(tmp_path / "run", tmp_path / "task.py")
    with pytest.raises(NotTrusted, match="not signed by your key"):
        check(run)


def test_a_command_is_given_again_for_the_recorded_config(tmp_path: Path) -> None:
    command = RecordedCommand("launch", "config.yaml", str(tmp_path), ("epochs=9", "resume=never"), ("--nproc", "2"))
    assert command.again(tmp_path / "my run", ["loader.workers=1"]) == [
        "launch", str(tmp_path / "my run" / "config.json"), "loader.workers=1",
        f'run_dir="{tmp_path}/my run"', "resume.checkpoint=auto", "--nproc", "2",
    ]  # fmt: skip
    script = RecordedCommand("train", "train.py", "/x", ("epochs=9", "run_dir=b", "resume=never"), (), ("--lr", "1"))
    assert script.again(Path("/run"), []) == [
        "train", "train.py", "epochs=9", 'run_dir="/run"', "resume.checkpoint=auto", "--", "--lr", "1",
    ]  # fmt: skip
    with pytest.raises(LaunchError, match="run_dir=x: samestep resume resumes the run in"):
        script.again(Path("/run"), ["run_dir=x"])


def test_a_launcher_is_believed_about_its_own_file_only(monkeypatch: pytest.MonkeyPatch) -> None:
    command = RecordedCommand("launch", "a.yaml", str(Path.cwd()))
    environ = command.variables()
    assert RecordedCommand.of_launcher(environ, Path("./a.yaml")) == command
    assert RecordedCommand.of_launcher(environ, Path("b.yaml")) is None
    for text in ("", "null", "[]", '{"verb": "rm"}', '{"verb": "train", "file": 1}'):
        assert RecordedCommand.of_launcher({VARIABLE: text}, Path("a.yaml")) is None


def test_the_line_that_resumes_a_run_is_known_where_its_command_is(tmp_path: Path) -> None:
    config = load_config({"epochs": 1, "global_batch": 8, "run_dir": "my run"})
    assert resume_line(config) is None
    with started_by(RecordedCommand("train", "a.yaml", str(tmp_path))):
        assert resume_line(config) == "samestep resume 'my run'"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("no command", "does not record a samestep command that started it"),
        ("unsigned", "would run samestep launch"),
        ("no folder", "which cannot be entered"),
        ("no run", "is not a run's directory"),
    ],
)
def test_what_cannot_be_resumed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "gone"
    folder.mkdir()
    command = RecordedCommand("launch", "a.yaml", str(folder), options=("--nproc", "2"))
    run = a_run(tmp_path / "run", tmp_path / "task.py", None if spoil == "no command" else command)
    if spoil == "unsigned":  # the task is gone, but the config names programs, too
        (tmp_path / "task.py").unlink()
        key_path().unlink()
    elif spoil == "no folder":
        folder.rmdir()
    elif spoil == "no run":
        shutil.rmtree(run)
    done = CliRunner().invoke(app, ["resume", "run"])
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert "Traceback" not in done.output


def test_agents_over_ssh_know_the_launch_that_they_are_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"epochs": 1, "global_batch": 8})
    command = RankCommand(config, Path("a.yaml"))
    typed = RecordedCommand("launch", "a.yaml", str(Path.cwd()), options=("--via", "ssh"))
    monkeypatch.setenv(VARIABLE, typed.variables()[VARIABLE])
    agents = ssh_commands(command, parse_hosts("n1:1,n2:1", None), "name")
    assert f"export {VARIABLE}=" in agents.argv(1)[-1]
    assert VARIABLE not in agents.script(), "whoever runs that has typed another command"
