"""The command that reads a code base for what breaks or differs on several ranks: scan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.app import STARTING, AsJson, app, guarded, print_rows, usable

FOUND = 1
"""Exit code when something was found."""


def _usable(paths: list[Path] | None) -> list[Path] | None:
    for path in paths or ():
        usable(path)
    return paths


@app.command(rich_help_panel=STARTING)
def scan(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            callback=_usable, help="Folders, Python files, notebooks.", metavar="PATH..."
        ),
    ] = None,
    rules: Annotated[
        str, typer.Option(help="Look for these alone: names, with commas between.")
    ] = "",
    ignore: Annotated[str, typer.Option(help="Leave these out.")] = "",
    as_json: AsJson = False,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also write an HTML page here.")
    ] = None,
    show_rules: Annotated[bool, typer.Option("--list", help="Show all rules, and exit.")] = False,
) -> None:
    """Read code, without running it, for what breaks or differs on several ranks.

    Exits 0 if nothing was found, 1 if something was, 2 if there is nothing to read. A line with the comment
    `# samestep: ok` or `# samestep: ok\\[rule]` is left out.
    """
    with guarded():
        from samestep.errors import LaunchError
        from samestep.report.page import refuse_other_file
        from samestep.scan.report import COLUMNS, lines, rows, rule_rows, summary, write_report
        from samestep.scan.rules import chosen_rules
        from samestep.scan.scan import scan as read_code

        chosen = chosen_rules(rules, ignore)
        if show_rules:
            print_rows(("rule", "on several ranks it", "what it is", "write"), rule_rows(chosen))
            return
        if not paths:
            raise LaunchError("nothing to read: give a folder, a Python file or a notebook")
        if report is not None:
            refuse_other_file(report)
        found = read_code(paths, chosen)
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
        if report is not None:
            write_report(found, ", ".join(map(str, paths)), report)
            typer.echo(f"Page: {report}", err=True)
    if found.findings:
        raise typer.Exit(FOUND)
