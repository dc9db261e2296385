"""The command that lists runs: runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from samestep.cli.app import RUNS, AsJson, app, finite, guarded, print_rows, usable
from samestep.cli.show import status_of, text_of
from samestep.errors import CheckpointError, RunDirError

_DEPTH = 3
"""Folders below `runs` in which runs are looked for."""


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

        if not folder.is_dir():
            raise RunDirError(f"there is no folder {folder}: name the one that your runs are in")
        found: list[dict[str, Any]] = []
        for run in sorted(_run_folders(folder, RESULT), key=lambda run: (run / RESULT).stat().st_mtime):
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


def _run_folders(folder: Path, marker: str, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the directories of runs, at most `depth` levels below a folder."""
    if (folder / marker).is_file():
        yield folder
    elif depth:
        try:
            inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        except OSError as error:
            typer.echo(f"samestep: {folder} cannot be read: {error.strerror or error}", err=True)
            return
        for inner in inside:
            yield from _run_folders(inner, marker, depth - 1)


def _run_row(one: dict[str, Any]) -> tuple[Any, ...]:
    best = one["best"] or {}
    shown = f"{best['metric']} {text_of(best['value'])}, step {best['step']}" if best else ""
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["written"]))
    return (one["run"], one["status"], one["steps"], one["world"], text_of(one["loss"]), shown, written)
