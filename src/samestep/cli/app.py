"""Shared by all commands: the app, their arguments, and how errors are shown."""

from __future__ import annotations

import io
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from samestep.cli.script_args import split_args
from samestep.environment.launch import detect_launch
from samestep.environment.variables import has_agent, process_environment, report_pipe, take_ending_process
from samestep.errors import LaunchError, PeerLost, SamestepError, Stopped
from samestep.parsing.files import unusable_path
from samestep.parsing.limits import short, visible
from samestep.tracebacks import format_error
from samestep.version import __version__

if TYPE_CHECKING:
    from rich.text import Text

TRAINING, STARTING, MODELS, RUNS = ("Train", "Start and check", "Tune and use a model", "Look at runs")
"""Where --help shows a command."""

_ORDER = (
    "train", "launch", "resume", "stop", "cv", "sweep", "verify", "demo", "init", "check", "bench", "tune", "predict",
    "export", "average", "show", "runs", "plot", "ui", "probe", "latency", "warm",
)  # fmt: skip

T = TypeVar("T")


class Commands(TyperGroup):
    """Commands whose --help shows no type beside a flag, as if it took a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_types(command.get_params(ctx))
        return command


def _without_types(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _InOrder(Commands):
    """The commands as a person meets them, whatever module registers them first."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=_ORDER.index)


_BY_LAUNCH = "samestep launch starts the ranks of a training; verify, tune lanes and bench have --worlds"
_ELSEWHERE = {
    **dict.fromkeys(("--nproc", "--nodes", "--hosts", "--via"), _BY_LAUNCH),
    "--resume": "a run resumes by itself when it is started again with the same name",
}
"""Options that people try on commands which have none such."""


class TakesScript(TyperCommand):
    """A command for a config, or for a script that opens a run, with its own arguments."""

    takes_any = False
    """Whether it may be a script that opens no run, and so takes no overrides."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            if parameter.param_type_name == "option"
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        found = split_args(args, options, self.takes_any)
        if found is not None:
            args, ctx.meta[_ARGUMENTS] = found
        ctx.meta[_WORDS] = tuple(args)
        for word in args:
            name = word.partition("=")[0]
            if name in _ELSEWHERE and name not in options:
                raise typer.BadParameter(f"{name} is no option of this command: {_ELSEWHERE[name]}")
        return super().parse_args(ctx, args)


class TakesAnyScript(TakesScript):
    """A command for scripts that open no run as well."""

    takes_any = True


_WORDS, _ARGUMENTS = "samestep.words", "samestep.arguments"


def script_arguments(context: typer.Context) -> tuple[str, ...]:
    """Return what was given for the script itself."""
    found: tuple[str, ...] = context.meta.get(_ARGUMENTS, ())
    return found


def typed_options(context: typer.Context, *left_out: str) -> tuple[str, ...]:
    """Return the options that were given, in their long form, without some of them."""
    found: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        value = context.params.get(name)
        if parameter.param_type_name != "option" or name in left_out or value == parameter.default:
            continue
        text = str(value)
        found += [parameter.opts[0]] if value is True else [parameter.opts[0], text]
    return tuple(found)


def command_with(context: typer.Context, option: str) -> str:
    """Return the command line that was typed, with one more option."""
    ours, arguments = context.meta[_WORDS], script_arguments(context)
    tail = ["--", *arguments] if arguments else []
    return shlex.join(["samestep", str(context.info_name), *ours, option, *tail])


app = typer.Typer(name="samestep", cls=_InOrder, no_args_is_help=True, pretty_exceptions_enable=False)


def usable(value: T) -> T:
    """Return a path, a name or words of the command line; refused if nothing can be of such a name."""
    if isinstance(value, list):
        paths = split_overrides([str(word) for word in value])[0]
    else:
        paths = [] if value is None else [Path(str(value))]
    for path in paths:
        if why := unusable_path(path):
            raise typer.BadParameter(f"{short(ascii(str(path)))}: {why}")
    return value


def refuse_outputs(
    page: Path | None = None, picture: Path | None = None, result: Path | None = None, force: bool | None = None
) -> None:
    """Refuse to replace what is not ours, before the work of a command; `force` is None where there is no --force."""
    if picture is not None:
        from samestep.report.picture import refuse_picture

        refuse_picture(picture, bool(force))
    if page is not None and not force:
        from samestep.report.page import refuse_other_file

        refuse_other_file(page, *([] if force is None else ["--force replaces it, or name another file"]))
    if result is not None:
        from samestep.bench.document import refuse_other_result

        refuse_other_result(result)


def is_there(word: str) -> bool:
    """Return whether a word of the command line is the path of something."""
    path = Path(word)
    return not unusable_path(path) and path.exists()


def split_overrides(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the paths and the `section.key=value` texts among the words of a command."""
    overrides = [word for word in words if re.match(r"[A-Za-z_][\w.-]*=", word) and not is_there(word)]
    return [Path(word) for word in words if word not in overrides], overrides


RunFile = Annotated[
    Path,
    typer.Argument(
        callback=usable,
        help="The run's YAML or JSON file, or a script that calls samestep.start; its own arguments "
        "come last, after -- where they could be ours.",
        metavar="CONFIG|SCRIPT.py",
    ),
]
ConfigFile = Annotated[Path, typer.Argument(callback=usable, help="The run's YAML or JSON file.", metavar="CONFIG")]
RunDirPath = Annotated[Path, typer.Argument(callback=usable, help="A run's directory.", metavar="RUN")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Config values, as section.key=value.", metavar="KEY=VALUE")
]
# torch.distributed.launch passes it before everything else, our own launch at the end.
LocalRank = Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)]
Launched = Annotated[bool, typer.Option("--launched", hidden=True)]
# How `verify` has its runs observed, by whatever starts their ranks.
Trace = Annotated[Path | None, typer.Option(hidden=True)]
TraceFrom = Annotated[int, typer.Option(hidden=True)]
# Where a run of a sweep asks whether to continue.
PruneDir = Annotated[Path | None, typer.Option(hidden=True)]
# Seconds after which a run that nobody looks at ends, if nothing moves in it.
HangTimeout = Annotated[float | None, typer.Option(min=0.1, hidden=True)]
StartTimeout = Annotated[float | None, typer.Option(min=0.1, hidden=True)]
Trust = Annotated[bool, typer.Option("--trust", help="Run the code that RUN names, also if it may not be yours.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_SECONDS_FOR_THE_CAUSE = 3.0


@contextmanager
def guarded(launched: bool = False) -> Iterator[None]:
    """Show errors as users want them: mistakes without a traceback, those of their code with it."""
    environ = process_environment()
    try:
        yield
        _report_end(environ)
    except Exception as error:
        if has_agent(environ):
            from samestep.distributed.health.failure_report import report_failure

            report_failure(error)
        if isinstance(error, PeerLost) and report_pipe(environ) is None:
            # A launcher ends all ranks with the first: let that be the one that failed by itself.
            time.sleep(_SECONDS_FOR_THE_CAUSE)
        if not launched:  # else the launcher shows it, the failing rank's first
            _show(error)
        raise typer.Exit(error.exit_code if isinstance(error, SamestepError) else 1) from None
    except SystemExit as end:  # of a script
        if end.code in (None, 0):
            _report_end(environ)
        raise


def _report_end(environ: Mapping[str, str]) -> None:
    if report_pipe(environ) is not None:
        from samestep.distributed.health.failure_report import report_end

        report_end()


def _show(error: Exception) -> None:
    if isinstance(error, Stopped):
        return  # the run has logged it
    who = "" if str(error).startswith("rank ") else _which_rank()
    if isinstance(error, PeerLost):  # the lost rank's own error is on this terminal as well
        text = f"samestep: {who}{str(error).splitlines()[0]}"
    elif isinstance(error, SamestepError):
        text = f"samestep: {who}{error}"
    else:
        trace = format_error(error)
        text = f"samestep: {who}failed:\n{trace}" if who else trace
    typer.echo(visible(text), err=True)


def _which_rank() -> str:
    """Return which rank this is, where several ranks print to one terminal."""
    try:
        launch = detect_launch(process_environment())
    except LaunchError:
        return ""
    return f"rank {launch.rank} on {socket.gethostname()} " if launch.world > 1 else ""


def print_rows(
    header: tuple[str, ...], rows: Sequence[tuple[object, ...]], err: bool = False, best: Container[int] = ()
) -> None:
    """Print a table, as wide as the terminal or as a wide one, with its best rows in bold."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(*(Column(plain(name)) for name in header))
    for at, row in enumerate(rows):
        cells = (plain("" if cell is None else cell) for cell in row)
        table.add_row(*cells, style="bold green" if at in best else None)
    terminal = (sys.stderr if err else sys.stdout).isatty()
    Console(width=None if terminal else 140, stderr=err).print(table)


@contextmanager
def reporting() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what long work does: lines, each with its time on a terminal."""
    if not sys.stderr.isatty():
        yield lambda line: typer.echo(line, err=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    rows: list[TaskID] = []
    with Progress(*columns, console=Console(stderr=True)) as shown:

        def report(line: str) -> None:
            for row in rows[-1:]:
                shown.update(row, total=1, completed=1)
            rows.append(shown.add_task(visible(line), total=None))

        yield report
        for row in rows[-1:]:
            shown.update(row, total=1, completed=1)


def plain(text: object) -> Text:
    """Return what a terminal shows of a text from anywhere: no markup, no control characters."""
    from rich.text import Text

    return Text(visible(str(text)))


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"samestep {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    local_rank: LocalRank = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Distributed PyTorch training that is the same run at any size."""
    context.obj = local_rank
    parent = take_ending_process()
    if parent is not None:
        from samestep.distributed.signals import end_with_parent

        end_with_parent(signal.SIGTERM, parent)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path that is not of this terminal's characters is shown, and not a traceback.
        sys.stdout.reconfigure(errors="backslashreplace")
