"""Secrets in launch.environment: in no file, no table and on no command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.config import Config, load_config, override_config
from samestep.config.secrets import is_secret
from samestep.errors import ConfigError, LaunchError
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.slurm import slurm_job
from samestep.launch.commands.torchrun import torchrun_command

SECRET = "hf_S3CR3T"
GOOD: dict[str, Any] = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}


def config_with(**environment: str) -> Config:
    return load_config({**GOOD, "launch": {"environment": environment}})


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SAMESTEP_SECRET", "PGPASSWORD",
     "MYSQL_PWD", "OPENAI_APIKEY", "Db_Password", "GOOGLE_APPLICATION_CREDENTIALS", "PROXY_AUTH",
     "TOKEN2", "SLACK_WEBHOOK", "SENTRY_DSN", "WANDB_API"],
)  # fmt: skip
def test_names_that_look_secret(name: str) -> None:
    assert is_secret(name, "x")


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "HF_HOME", "PWD", "MONKEY", "NCCL_DEBUG", "AUTHOR", "API_URL"]
)
def test_names_that_do_not(name: str) -> None:
    assert not is_secret(name, "/data/it's here")
    assert is_secret(name, "postgres://me:word@host/db"), "a URL with a password is one"


@pytest.mark.parametrize(
    "override",
    [f"launch.environment.HF_TOKEN={SECRET}", f"launch.environment={{HF_TOKEN: {SECRET}}}",
     f"launch={{environment: {{HF_TOKEN: {SECRET}}}, mpirun: other}}",
     f"launch.environment.HF_TOKEN={SECRET}\n"],
)  # fmt: skip
def test_a_secret_is_refused_and_not_shown(override: str) -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        load_config(GOOD, [override])
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        override_config(load_config(GOOD), [override])
    assert SECRET not in str(caught.value)


def test_what_to_write_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.environment\.HF_TOKEN: looks like a secret.*: write \$\{HF_TOKEN\}"
    ):
        config_with(HF_TOKEN=SECRET, HF_HOME="/data")
    with pytest.raises(ConfigError, match=r"launch\.environment\.DATABASE: looks like a secret"):
        config_with(DATABASE=f"postgres://me:{SECRET}@host/db")


def test_a_reference_is_looked_up_where_the_run_is_launched() -> None:
    config = config_with(A="${B}", C="${D}", E="x${F}y")
    assert config.launch.variables({"B": "1", "D": "2", "F": "3"}) == {"A": "1", "C": "2", "E": "x${F}y"}
    with pytest.raises(LaunchError) as caught:
        config.launch.variables({})
    assert "launch.environment.A is ${B}, and B is not set here" in str(caught.value)
    assert "launch.environment.C is ${D}, and D is not set here" in str(caught.value)


def test_scripts_take_a_secret_from_where_they_run() -> None:
    overrides = ("seed=1", "launch.environment.HF_TOKEN=${HF_TOKEN}")
    command = RankCommand(load_config(GOOD, overrides), Path("run.yaml"), overrides)
    for launch in (torchrun_command(command, 2), slurm_job(command, None, 2)):
        assert 'export HF_TOKEN="${HF_TOKEN:?set it for this launch}"' in launch.script()


def test_a_command_refuses_a_secret_and_what_it_writes_is_for_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    for value, code in ((SECRET, 2), ("${HF_TOKEN}", 0)):
        environment = f'{{HF_TOKEN: "{value}", HF_HOME: /data}}'
        text = f"task: t.py:T\nepochs: 1\nglobal_batch: 8\nlaunch: {{environment: {environment}}}\n"
        Path("run.yaml").write_text(text)
        shown = run(app, ["show", "run.yaml"])
        assert shown.exit_code == code, shown.output
        script = run(app, ["launch", "run.yaml", "--nproc", "2", "--print", "--write", "run.sh"])
        assert script.exit_code == code, script.output
        assert SECRET not in shown.output + script.output
    assert Path("run.sh").stat().st_mode & 0o777 == 0o700
    again = run(app, ["launch", "run.yaml", "--nproc", "2", "--write", "run.sh"])
    assert again.exit_code == 2
    assert "run.sh exists already: remove it, or name another file" in again.output
