"""The commands as a person types them, in real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from samestep import __version__ as version
from samestep.cli import app
from tests.cli.processes import TASKS, environment, on_a_terminal, samestep, torchrun, write_config
from tests.distributed.running import rows_of


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Commands that start no run, in this process: the same app, without a start of torch."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    values = {"evaluation": {"every_epochs": None}, "distributed": {"timeout": 60}}
    return write_config(tmp_path / "small.yaml", steps=5, **values)


def test_help_shows_commands_in_the_order_a_person_meets_them(here: Callable[..., Result]) -> None:
    shown = here("--help").output
    words = ["╭─ Train ", "train", "launch", "resume", "stop", "cv", "sweep", "verify",
             "╭─ Start", "init", "check", "bench", "╭─ Tune", "tune", "predict", "export", "average",
             "╭─ Look", "show", "runs", "plot"]  # fmt: skip
    places = [shown.find(word if word.startswith("╭") else f"\n│ {word} ") for word in words]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("command", [["train"], ["bench", "scaling"], ["sweep", "best"]])
def test_a_flag_is_not_shown_as_if_it_took_a_value(command: list[str], here: Callable[..., Result]) -> None:
    flags = [line for line in here(*command, "--help").output.splitlines() if "--help" in line or "--json" in line]
    assert len(flags) == 2
    assert all("<" not in line for line in flags)


def test_the_version_is_the_packages_own(here: Callable[..., Result]) -> None:
    assert here("--version").output == f"samestep {version}\n"


def test_bash_completes_commands(tmp_path: Path) -> None:
    script = (
        'eval "$(samestep --show-completion)"; COMP_WORDS=(samestep lau); COMP_CWORD=1; '
        '_samestep_completion samestep; echo "${COMPREPLY[@]}"; complete -p samestep'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path, env={**environment(), "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["launch", "complete -o default -F _samestep_completion samestep"]


@pytest.mark.requirement("004-VS-1", "001-S2-10")
def test_init_writes_what_trains_and_verifies(tmp_path: Path) -> None:
    words = ("init", "mine/config.yaml", "--optimizer", "sgd", "--lr", "0.1", "--epochs", "1")
    written = samestep(*words, cwd=tmp_path)
    assert written.stdout.endswith("now: samestep train mine/config.yaml\n"), written.stderr
    assert samestep("show", "mine/config.yaml", cwd=tmp_path).returncode == 0
    trained = samestep("train", "mine/config.yaml", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "accuracy" in trained.stderr
    assert "Optimizers: SGD" in trained.stderr
    verified = samestep("verify", "mine/config.yaml", "--worlds", "1,2", "--steps", "4", "--json", cwd=tmp_path)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["kept"] is True


def test_a_terminal_gets_a_progress_bar_with_lines_above_it(config: Path, tmp_path: Path) -> None:
    code, _, shown = on_a_terminal("train", config, "evaluation.every_epochs=1", cwd=tmp_path)
    assert code == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "5/5" in plain
    assert re.search(r"loss \d\.\d+ +[\d,]+ samples/s", plain)
    assert re.search(r"[\r\n]epoch 1  step 3  val_loss", plain), "on its own line"


@pytest.mark.requirement("002-T-2", "002-T-3", "002-T-4", "000-P2-8")
def test_launch_trains_on_ranks_and_shows_rank_0(config: Path, tmp_path: Path) -> None:
    done = samestep("launch", config, "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Distributed training initialized: gloo backend, 2 processes" in done.stderr
    assert "Master: 127.0.0.1:" in done.stderr
    assert "[Rank 0]" in done.stderr
    assert "[Rank 1]" not in done.stderr
    logs = tmp_path / "runs" / "small" / "logs"
    assert "2 ranks drive 4+4 lanes" in (logs / "rank-1.log").read_text()
    assert "5 steps" in done.stdout


def test_launch_shows_a_bar_on_a_terminal_and_leaves_its_cursor(config: Path, tmp_path: Path) -> None:
    code, _, shown = on_a_terminal("launch", config, "--nproc", "2", cwd=tmp_path)
    assert code == 0, shown
    assert "5/5" in shown
    assert "samples/s" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is visible at the end"
    lost = ("evaluation.every_epochs=1", "name=killed")
    code, _, shown = on_a_terminal(
        "launch", config, f"task={TASKS}:LostInEvaluation", *lost, "--nproc", "2", cwd=tmp_path
    )
    assert code != 0
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the launcher shows it again, as rank 0 could not"


@pytest.mark.requirement("000-P0-2", "000-K-8", "003-SC-3", "002-T-4")
def test_train_is_a_rank_under_torchrun_and_the_legacy_launcher(config: Path, tmp_path: Path) -> None:
    losses = []
    for launcher in ("torch.distributed.run", "torch.distributed.launch"):
        name = launcher.rpartition(".")[2]
        cold = "torch's own start of interpreters" if name == "run" else ""
        done = torchrun("train", config, f"name={name}", cwd=tmp_path, launcher=launcher, cold=cold)
        assert done.returncode == 0, done.stderr
        assert "[Rank 1]" in done.stderr
        losses.append([row.get("loss") for row in rows_of(tmp_path / "runs" / name)])
    assert losses[0] == losses[1]


def test_a_failing_rank_is_shown_first_and_ends_all(config: Path, tmp_path: Path) -> None:
    # They do not wait for the timeout: it is longer than the test is given.
    done = samestep(
        "launch", config, f"task={TASKS}:Broken", "params.rank=1", "distributed.timeout=3000",
        "--nproc", "2", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    output = done.stderr[done.stderr.index("samestep: rank 1") :]
    assert "ZeroDivisionError: my own bug" in output
    assert "in loss" in output, "the user's own traceback"
    others = [line for line in output.splitlines() if line.startswith("rank 0")]
    assert not others or output.index("my own bug") < output.index(others[0])
    assert "ZeroDivisionError" not in done.stderr[: done.stderr.index("samestep: rank 1")]


def test_a_mistake_shows_no_traceback_on_ranks_either(config: Path, tmp_path: Path) -> None:
    done = samestep("launch", config, "params.nonsense=1", "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "Everything does not take them" in done.stderr
    assert "Traceback" not in done.stderr


def test_own_code_failing_in_one_process_shows_its_traceback(config: Path, tmp_path: Path) -> None:
    done = samestep("train", config, f"task={TASKS}:Broken", "params.rank=0", cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith("ZeroDivisionError: my own bug")


@pytest.mark.requirement("004-CI-4")
def test_verify_names_the_first_step_of_rank_seeded_dropout(config: Path, tmp_path: Path) -> None:
    done = samestep("verify", config, f"task={TASKS}:RankSeeded", "--worlds", "1,2", "--json", cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    result = json.loads(done.stdout)
    assert result["kept"] is False
    assert result["worlds"]["1"]["first_difference"] is None
    found = result["worlds"]["2"]["first_difference"]
    assert (found["what"], found["step"]) == ("loss", 0)
    assert found["tensor"] is not None
    assert found["ulp"] > 0


@pytest.mark.requirement("004-5.3-3", "004-VS-1")
def test_verify_catches_an_all_reduce_in_the_place_of_the_tree(config: Path, tmp_path: Path) -> None:
    done = samestep(
        "verify", config, f"task={TASKS}:LibrarySum", "steps=12", "--worlds", "1,4",
        "--report", "faulty.html", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "NOT kept" in done.stdout
    assert "loss from step" in done.stdout
    assert "ULP" in done.stdout
    page = (tmp_path / "faulty.html").read_text()
    assert "DIFFERENT" in page
    assert "<script src=" not in page, "the report is self-contained"


def test_verify_shows_ddp_beside_and_draws_a_card(config: Path, tmp_path: Path) -> None:
    words = ("--worlds", "1,2", "--steps", "3", "--ddp", "--report", "page.html", "--picture", "losses.png")
    done = samestep("verify", config, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    ours, _, ddp = page.partition("Beside it: DistributedDataParallel")
    hashes = [set(re.findall("<code>([0-9a-f]{16})</code>", part)) for part in (ours, ddp)]
    assert [len(found) for found in hashes] == [1, 2]  # one state; one per world size
    assert "2 different final states" in ddp
    assert "samestep verify" in ddp  # the command that made the page
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    done = samestep("verify", config, *words, cwd=tmp_path)
    assert done.returncode != 0
    assert "losses.png" in done.stderr  # a picture is not replaced


def test_verify_against_a_curve_from_elsewhere(config: Path, tmp_path: Path) -> None:
    samestep("train", config, "distributed.threads_per_rank=1", cwd=tmp_path)
    mine = tmp_path / "runs" / "small" / "metrics.jsonl"
    same = samestep("verify", config, "--worlds", "1", "--against", mine, "--json", cwd=tmp_path)
    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout)["against"]["first_difference"] is None
    other = tmp_path / "other.csv"
    other.write_text("step,loss\n0,1.5\n1,9.0\n")
    off = samestep("verify", config, "--worlds", "1", "--against", other, cwd=tmp_path)
    assert off.returncode == 4
    assert "Against the given curve: loss from step 0 on" in off.stdout
    alone = samestep("verify", config, "--worlds", "1", cwd=tmp_path)
    assert alone.returncode == 2
    assert "--worlds 1 is one run, with nothing to compare it with" in alone.stderr


@pytest.mark.requirement("000-P0-4")
def test_config_show_lists_origins_and_check_lists_mistakes(config: Path, here: Callable[..., Result]) -> None:
    rows = json.loads(here("show", config, "seed=7", "--json").stdout)
    assert rows["seed"] == {"value": 7, "origin": "override", "reason": None}
    assert rows["lanes"]["origin"] == "line 3"
    assert rows["epochs"]["origin"] == "default"
    assert rows["distributed.world_size"]["origin"] == "detected"
    assert rows["distributed.backend"]["reason"]
    assert "override" in here("show", config, "seed=7").stdout
    assert here("check", config).exit_code == 0
    wrong = here("check", config, "lanez=3", "steps=x")
    assert wrong.exit_code == 2
    assert "2 mistakes" in wrong.stderr
    assert "did you mean lanes?" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.requirement("001-S1-3")
def test_config_show_lists_what_the_launcher_set(
    config: Path, here: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    rows = json.loads(here("show", config, "--json").stdout)
    assert rows["distributed.world_size"] == {"value": 4, "origin": "environment", "reason": "WORLD_SIZE=4"}


def test_env_gives_a_reason_for_every_fact(here: Callable[..., Result]) -> None:
    facts = json.loads(here("check", "--facts", "--json").stdout)
    assert {"launcher", "platform", "backend", "device", "rank", "cpus"} <= facts.keys()
    assert all(fact["reason"] for fact in facts.values())
    assert "launcher" in here("check", "--facts").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "{config}", "--nproc", "9"], "9 ranks but only 8 lanes"),
        (["train", "{config}", "--nproc", "2"], "--nproc is no option of this command"),
        (["launch", "{config}", "--resume"], "--resume is no option of this command"),
        (["train", "{config}", "distributed.world_size=2"], "started alone"),
        (["verify", "{config}", "--worlds", "1,9"], "9 ranks but only 8 lanes"),
        (["train", "nowhere.yaml"], "cannot be read"),
        (["train", "{config}", "distributed.backend=nccl"], "nccl, which needs GPUs"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str], message: str, config: Path, here: Callable[..., Result]
) -> None:
    done = here(*(a.format(config=config) for a in arguments))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "Traceback" not in done.stderr
