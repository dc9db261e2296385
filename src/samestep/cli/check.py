"""The command that reports what would go wrong: check."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import STARTING, AsJson, LocalRank, app, guarded, print_rows, split_overrides, usable
from samestep.environment.launch import detect_launch
from samestep.environment.torch_build import installed_torch
from samestep.environment.variables import exporting, process_environment, thread_variables
from samestep.errors import LaunchError

if TYPE_CHECKING:
    from samestep.check.code.rule import Rule

_CONFIGS = (".yaml", ".yml", ".json")
FOUND_IN_CODE = 5
"""Exit code if code has lines that break or differ: as of a warning."""

Targets = Annotated[
    list[str] | None,
    typer.Argument(
        callback=usable,
        help="A config, with section.key=value; or folders, Python files and notebooks.",
        metavar="CONFIG|CODE|KEY=VALUE",
    ),
]


@app.command(rich_help_panel=STARTING)
def check(
    targets: Targets = None,
    facts: Annotated[bool, typer.Option("--facts", help="Show what was detected here, and exit.")] = False,
    rules: Annotated[str, typer.Option(help="Of code: look for these alone, with commas between.")] = "",
    ignore: Annotated[str, typer.Option(help="Of code: leave these rules out.")] = "",
    show_rules: Annotated[bool, typer.Option("--list", help="Show the rules for code, and exit.")] = False,
    as_json: AsJson = False,
    local_rank: LocalRank = None,
) -> None:
    """Report what would go wrong: on this machine, with a config, between ranks, or in code.

    Without a target it checks this machine; with a config, also whether it can run here; started as ranks, also what
    is between them. Code is read, not run, for what breaks or differs on several ranks; a line with the comment
    `# samestep: ok` or `# samestep: ok\\[rule]` is left out. Exits 0 if all is well, 5 with warnings, 6 with errors.

    Example: samestep check config.yaml
    """
    with guarded():
        config, code, overrides = _sort(targets or [])
        if facts:
            if targets or rules or ignore:
                raise LaunchError("--facts shows what was detected here, and takes nothing else but --json")
            return _print_facts(as_json)
        if overrides and config is None:
            raise LaunchError(f"{overrides[0]}: values are for a config, and none is given")
        if code or show_rules:
            from samestep.check.code.rules import chosen_rules

            chosen = chosen_rules(rules, ignore)
            if config is not None or overrides:
                raise LaunchError("a config and code are checked one after the other: name one of them")
            exit_code = _list(chosen, as_json) if show_rules else _check_code(code, chosen, as_json)
        else:
            if rules or ignore:
                raise LaunchError("--rules and --ignore are for code: name a folder or a file")
            exit_code = _check_machine(config, overrides, as_json)
    raise typer.Exit(exit_code)


def _sort(targets: list[str]) -> tuple[Path | None, list[Path], list[str]]:
    """Return the config, the code and the overrides among the arguments."""
    paths, overrides = split_overrides(targets)
    configs = [path for path in paths if path.suffix in _CONFIGS and not path.is_dir()]
    if len(configs) > 1:
        raise LaunchError(f"{', '.join(map(str, configs))}: give one config")
    return ((configs[0] if configs else None), [path for path in paths if path not in configs], overrides)


def _print_facts(as_json: bool) -> None:
    from samestep.cli.describe import describe_environment

    rows = describe_environment()
    if as_json:
        typer.echo(json.dumps({key: {"value": value, "reason": why} for key, value, why in rows}))
    else:
        print_rows(("fact", "value", "reason"), rows)


def _check_machine(config: Path | None, overrides: list[str], as_json: bool) -> int:
    with ExitStack() as scope:
        loaded = None
        if config is not None:
            from samestep.config import read_config

            loaded = read_config(config, overrides, look=True).config
            if installed_torch() is None:
                why = f"{config} is a valid config. Nothing else was checked: torch is not installed here"
                typer.echo(json.dumps({"worst": "ok", "exit_code": 0, "findings": [], "note": why}) if as_json else why)
                return 0
            threads = loaded.distributed.threads_per_rank
            scope.enter_context(exporting({} if threads == "auto" else thread_variables(threads)))
        from samestep.check.machine.findings import print_report
        from samestep.check.machine.run_checks import run_checks

        found = run_checks(loaded, None, show=lambda found: print_report(found, as_json))
    if found.alone and found.rank:
        # A launcher ends all ranks when the first one exits: let rank 0 print its findings.
        time.sleep(3)
    return found.exit_code


def _list(rules: list[Rule], as_json: bool) -> int:
    from samestep.check.code.report import rule_rows

    if as_json:
        names = ("rule", "effect", "title", "instead")
        typer.echo(json.dumps({"rules": [dict(zip(names, row, strict=True)) for row in rule_rows(rules)]}))
        return 0
    print_rows(("rule", "on several ranks it", "what it is", "write"), rule_rows(rules))
    return 0


def _check_code(paths: list[Path], rules: list[Rule], as_json: bool) -> int:
    from samestep.check.code.report import COLUMNS, lines, rows, summary
    from samestep.check.code.scan import scan

    if detect_launch(process_environment()).world > 1:
        raise LaunchError("code is read by one process: start this command once")
    found = scan(paths, rules)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        for line in lines(found):
            typer.echo(line)
        if found.findings:
            print_rows(COLUMNS, rows(found))
        typer.echo(summary(found))
    for file, why in found.skipped.items():
        typer.echo(f"samestep: {file} {why}; it was not read", err=True)
    return FOUND_IN_CODE if found.findings else 0
