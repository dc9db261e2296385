"""The command that lists runs: runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli.app import RUNS, AsJson, app, finite, guarded, print_rows, usable
from samestep.cli.show import status_of, text_of
from samestep.errors import CheckpointError, RunDirError


@app.command(rich_help_panel=RUNS)
def runs(
    folder: Annotated[Path, typer.Argument(callback=usable, help="Where runs are.", metavar="FOLDER")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder, the newest last.

    Example: samestep runs
    """
    with guarded():
        from samestep.checkpoint.run_result import RESULT, read_result
        from samestep.cli.ui.folders import find_folders

        if not folder.is_dir():
            raise RunDirError(f"there is no folder {folder}: name the one that your runs are in")
        found: list[dict[str, Any]] = []
        for run in sorted(find_folders(folder, _warn).runs, key=lambda run: (run / RESULT).stat().st_mtime):
            try:
                result = read_result(run)
            except CheckpointError as error:
                typer.echo(f"samestep: {error}", err=True)
                continue
            if result is not None:
                written = (run / RESULT).stat().st_mtime
                status = status_of(run, result)
                found.append({"run": str(run), **result.as_json(), "status": status, "written": written})
        if as_json:
            typer.echo(json.dumps(finite({"runs": found}), allow_nan=False))
        elif not found:
            typer.echo(f"no runs in {folder}")
        else:
            header = ("run", "status", "steps", "ranks", "loss", "best", "written")
            print_rows(header, [_run_row(one) for one in found])


def _warn(line: str) -> None:
    typer.echo(f"samestep: {line}", err=True)


def _run_row(one: dict[str, Any]) -> tuple[Any, ...]:
    best = one["best"] or {}
    shown = f"{best['metric']} {text_of(best['value'])}, step {best['step']}" if best else ""
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["written"]))
    return (one["run"], one["status"], one["steps"], one["world"], text_of(one["loss"]), shown, written)
