"""The command that shows runs in a browser while they train: ui."""

from __future__ import annotations

import secrets
import shlex
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.app import RUNS, Force, app, guarded, refuse_outputs
from samestep.errors import LaunchError, MissingExtraError, PlanError, RunDirError

if TYPE_CHECKING:
    from samestep.cli.ui.overview import Find

_FIRST_PORT, _PORTS = 8420, 20
_USUAL = ("runs", "sweeps")


@app.command(rich_help_panel=RUNS)
def ui(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders with runs, a run, or a sweep; if not given: runs and sweeps.", metavar="FOLDER"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port on 127.0.0.1; a free one if not given.")
    ] = None,
    share: Annotated[Path | None, typer.Option(help="Write the page into one HTML file, and serve nothing.")] = None,
    force: Force = False,
) -> None:
    """Show runs, sweeps and verifications in a browser, live. It reads their files and changes nothing.

    The page is for this user on this machine: its address has a token. On another machine, forward the port first:
    ssh -L 8420:127.0.0.1:8420 HOST.

    Example: samestep ui
    """
    with guarded():
        chosen = _existing(folders)
        if share is not None and port is not None:
            raise PlanError("--share writes a file and serves nothing: leave out --port")
        if share is not None:
            _share(chosen, share, force)
        else:
            _serve(chosen, port)


def _existing(folders: Sequence[Path] | None) -> list[Path]:
    if folders:
        missing = [folder for folder in folders if not folder.is_dir()]
        if missing:
            raise RunDirError(f"there is no folder {', '.join(map(str, missing))}: name where your runs are")
        return list(folders)
    found = [Path(name) for name in _USUAL if Path(name).is_dir()]
    if not found:
        raise RunDirError("there is no folder runs or sweeps here: name the one that your runs are in")
    return found


def find_all(folders: Sequence[Path]) -> Find:
    """Return a function that looks into some folders; once it prints a line for each that cannot be read."""
    from samestep.cli.ui.folders import Folders, find_folders

    warned: set[str] = set()

    def warn(line: str) -> None:
        if line not in warned:
            typer.echo(f"samestep: {line}", err=True)
        warned.add(line)

    def find() -> Folders:
        each = [find_folders(folder, warn) for folder in folders]
        return Folders(
            _distinct(run for found in each for run in found.runs),
            _distinct(sweep for found in each for sweep in found.sweeps),
            _distinct(proof for found in each for proof in found.proofs),
        )

    return find


def _distinct(paths: Iterable[Path]) -> list[Path]:
    """Return each place once, by the first of its names."""
    return list({path.resolve(): path for path in reversed(list(paths))}.values())[::-1]


def _share(folders: Sequence[Path], path: Path, force: bool) -> None:
    from samestep.cli.ui.pages import Pages
    from samestep.cli.ui.view import static_page
    from samestep.report.page import write_document

    refuse_outputs(path, force=force)
    write_document(path, static_page(Pages(find_all(folders)).all()))
    typer.echo(f"Page: {path}")


def _serve(folders: Sequence[Path], port: int | None) -> None:
    from samestep.cli.ui.pages import Pages

    try:
        from samestep.cli.ui.server import LiveServer
    except ImportError:
        raise MissingExtraError("samestep ui", "ui") from None
    token = secrets.token_urlsafe(24)
    with _listening(port) as listening:
        number = listening.getsockname()[1]
        address = f"http://127.0.0.1:{number}/?token={token}"
        typer.echo(f"{', '.join(map(str, folders))}: {address}")
        forward = shlex.join(["ssh", "-N", "-L", f"{number}:127.0.0.1:{number}", socket.gethostname()])
        typer.echo(f"From another machine, first: {forward}. Ctrl-C ends it.", err=True)
        LiveServer(Pages(find_all(folders)), token).serve(listening)


def _listening(port: int | None) -> socket.socket:
    ports = [port] if port is not None else range(_FIRST_PORT, _FIRST_PORT + _PORTS)
    for number in ports:
        try:
            return socket.create_server(("127.0.0.1", number))
        except OSError as error:
            reason = error.strerror or str(error)
    tried = f"port {ports[0]}" if port is not None else f"each port from {ports[0]} to {ports[-1]}"
    raise LaunchError(f"{tried} of 127.0.0.1 cannot be used: {reason}. Set another one: --port")
