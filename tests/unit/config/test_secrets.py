"""Secrets in launch.environment: in no file, no table and on no command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.config import Config, load_config, override_config, read_config
from samestep.config.secrets import is_secret, public_overrides
from samestep.errors import ConfigError, LaunchError
from samestep.launch.commands.mpirun import mpirun_command
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.size import parse_hosts
from samestep.launch.commands.slurm import slurm_job
from samestep.launch.commands.ssh import ssh_commands
from samestep.launch.commands.torchrun import torchrun_command

SECRET = "hf_S3CR3T"
GOOD: dict[str, Any] = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}


def config_with(**environment: str) -> Config:
    return load_config({**GOOD, "launch": {"environment": environment}})


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SAMESTEP_SECRET", "PGPASSWORD",
     "MYSQL_PWD", "OPENAI_APIKEY", "Db_Password", "GOOGLE_APPLICATION_CREDENTIALS", "PROXY_AUTH",
     "TOKEN2"],
)  # fmt: skip
def test_names_that_look_secret(name: str) -> None:
    assert is_secret(name, "x")


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "HF_HOME", "PWD", "MONKEY", "NCCL_DEBUG", "AUTHOR"])
def test_names_that_do_not(name: str) -> None:
    assert not is_secret(name, "/data/it's here")
    assert is_secret(name, "postgres://me:word@host/db"), "a URL with a password is one"


def test_a_secret_is_nowhere_that_a_config_is_written_or_shown() -> None:
    config = config_with(HF_TOKEN=SECRET, HF_HOME="/data")
    shown = [
        config.model_dump_json(), repr(config), str(config), str(config.model_dump()),
        repr(list(read_config({**GOOD, "launch": {"environment": {"HF_TOKEN": SECRET}}}).rows())),
    ]  # fmt: skip
    assert SECRET not in "".join(shown)
    assert config.launch.environment == {"HF_TOKEN": "${HF_TOKEN}", "HF_HOME": "/data"}
    assert config.launch.variables({}) == {"HF_TOKEN": SECRET, "HF_HOME": "/data"}


def test_a_mistake_shows_names_and_no_values() -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        config_with(HF_TOKEN=f"{SECRET}\n")
    assert SECRET not in str(caught.value)


def test_a_secret_survives_overrides_but_not_storage() -> None:
    config = config_with(HF_TOKEN=SECRET)
    assert override_config(config, ["epochs=2"]).launch.variables({}) == {"HF_TOKEN": SECRET}
    changed = override_config(config, ["launch.environment.HF_TOKEN=other"])
    assert changed.launch.variables({}) == {"HF_TOKEN": "other"}
    none = override_config(config, ["launch.environment={}"])
    assert none.launch.variables({}) == {}
    stored = load_config(json.loads(config.model_dump_json()))
    with pytest.raises(LaunchError, match="HF_TOKEN is not set here"):
        stored.launch.variables({})
    assert stored.launch.variables({"HF_TOKEN": "now"}) == {"HF_TOKEN": "now"}
    assert stored.model_dump() == config.model_dump(), "a resume compares these"


def test_a_reference_is_looked_up_where_the_run_is_launched() -> None:
    config = config_with(A="${B}", C="${D}", E="x${F}y")
    assert config.launch.variables({"B": "1", "D": "2", "F": "3"}) == {"A": "1", "C": "2", "E": "x${F}y"}
    with pytest.raises(LaunchError) as caught:
        config.launch.variables({})
    assert "launch.environment.A is ${B}, and B is not set here" in str(caught.value)
    assert "launch.environment.C is ${D}, and D is not set here" in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [f"launch.environment.HF_TOKEN={SECRET}", f"launch.environment={{HF_TOKEN: {SECRET}}}",
     f"launch={{environment: {{HF_TOKEN: {SECRET}}}, mpirun: other}}"],
)  # fmt: skip
def test_no_script_and_no_command_line_holds_a_secret(override: str) -> None:
    overrides = ("seed=1", override)
    command = RankCommand(load_config(GOOD, overrides), Path("run.yaml"), overrides)
    hosts = parse_hosts("n1:1,n2:1", None)
    launches = [
        torchrun_command(command, 2),
        slurm_job(command, None, 2),
        mpirun_command(command, "openmpi", 2, (), "name", {}, cpus=4, as_root=False),
    ]
    agents = ssh_commands(command, hosts, "name")
    texts = [launch.script() for launch in launches]
    assert all('export HF_TOKEN="${HF_TOKEN:?set it for this launch}"' in text for text in texts)
    words = [*launches[0].rank_argv, *launches[2].argv, *agents.argv(0)]  # type: ignore[union-attr]
    assert SECRET not in "".join([*texts, agents.script(), *words])
    assert launches[2].variables["HF_TOKEN"] == SECRET  # type: ignore[union-attr]
    again = load_config(GOOD, public_overrides(overrides, command.config.launch.environment))
    assert again.model_dump() == command.config.model_dump()


def test_what_a_command_prints_and_writes_is_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = f"{{HF_TOKEN: {SECRET}, HF_HOME: /data}}"
    Path("run.yaml").write_text(f"task: t.py:T\nepochs: 1\nglobal_batch: 8\nlaunch: {{environment: {environment}}}\n")
    run = CliRunner().invoke
    shown = run(app, ["show", "run.yaml"])
    assert shown.exit_code == 0, shown.output
    script = run(app, ["launch", "run.yaml", "--nproc", "2", "--print", "--write", "run.sh"])
    assert script.exit_code == 0, script.output
    assert SECRET not in shown.output + script.output + Path("run.sh").read_text()
    assert Path("run.sh").stat().st_mode & 0o777 == 0o700
    again = run(app, ["launch", "run.yaml", "--nproc", "2", "--write", "run.sh"])
    assert again.exit_code == 2
    assert "run.sh exists already: remove it, or name another file" in again.output
