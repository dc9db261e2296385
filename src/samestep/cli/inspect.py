"""The commands that look, or write files to start from: init, env, config, doctor."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.app import (
    STARTING,
    AsJson,
    ConfigFile,
    LocalRank,
    Overrides,
    app,
    guarded,
    print_rows,
    usable,
)
from samestep.environment.variables import exporting, thread_variables
from samestep.errors import LaunchError

config_app = typer.Typer(help="Look at a config.", no_args_is_help=True)
app.add_typer(config_app, name="config", rich_help_panel=STARTING)


@app.command(rich_help_panel=STARTING)
def init(
    folder: Annotated[
        Path | None,
        typer.Argument(
            callback=usable, help="Where to write; created if missing.", metavar="FOLDER"
        ),
    ] = None,
    template: Annotated[
        str, typer.Option(help="The kind of machine, of those that --list shows.", metavar="NAME")
    ] = "",
    show_templates: Annotated[
        bool, typer.Option("--list", help="Show the templates, and exit.")
    ] = False,
) -> None:
    """Write a commented config.yaml and task.py to start from."""
    with guarded():
        from samestep.cli.starter import write_starter
        from samestep.cli.starter.templates import TEMPLATES, write_template

        if show_templates:
            rows = [
                (one.name, one.machine, "\n".join(one.shown_commands("CONFIG")))
                for one in TEMPLATES.values()
            ]
            print_rows(("template", "for", "started by"), rows)
            return
        if folder is None:
            raise LaunchError("nowhere to write: give a folder, or --list")
        commands = [f"samestep train {folder / 'config.yaml'}"]
        if template:
            chosen, written = write_template(template, folder)
            commands = chosen.shown_commands(written[0])
        else:
            written = write_starter(folder)
        for path in written:
            typer.echo(f"wrote {path}")
        for command in commands:
            typer.echo(f"now: {command}")


@app.command(rich_help_panel=STARTING)
def env(
    as_json: AsJson = False,
) -> None:
    """Show what was detected here, each fact with its reason."""
    with guarded():
        from samestep.cli.describe import describe_environment

        rows = describe_environment()
        if as_json:
            facts = {key: {"value": value, "reason": reason} for key, value, reason in rows}
            typer.echo(json.dumps(facts))
        else:
            print_rows(("fact", "value", "reason"), rows)


@app.command(rich_help_panel=STARTING)
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(callback=usable, help="The run's YAML or JSON file.", metavar="[CONFIG]"),
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Report what would go wrong before it does; started as ranks, also between them.

    Exits 0 if all is well, 5 with warnings, 6 with errors.
    """
    with guarded(), ExitStack() as scope:
        loaded = None
        if config is not None:
            from samestep.config import load_config

            loaded = load_config(config, overrides or [])
            threads = loaded.distributed.threads_per_rank
            scope.enter_context(exporting({} if threads == "auto" else thread_variables(threads)))
        from samestep.doctor.examine import examine
        from samestep.doctor.show import print_examination

        found = examine(loaded, None, show=lambda found: print_examination(found, as_json))
        if found.alone and found.rank:
            # A launcher ends all ranks when the first one exits: let rank 0 print its findings.
            time.sleep(3)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


@config_app.command()
def show(
    config: ConfigFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show the resolved config with the origin of each value."""
    with guarded():
        from samestep.cli.describe import describe_config

        rows = describe_config(config, overrides or [])
        if as_json:
            values = {
                key: {"value": value, "origin": origin, "reason": reason}
                for key, value, origin, reason in rows
            }
            typer.echo(json.dumps(values))
        else:
            print_rows(("key", "value", "origin", "reason"), rows)


@config_app.command()
def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Say everything that is wrong with a config, as far as that needs no torch; exits 0 if nothing is."""
    with guarded():
        from samestep.config import read_config

        read_config(config, overrides or [], look=True)
        typer.echo(f"{config} is a valid config")
