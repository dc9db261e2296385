"""Scripts that open no run, started as torchrun starts them. No torch here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from samestep.config import Config
from samestep.environment.interpreter import interpreter_words
from samestep.environment.launch import requested_threads
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError, TextError
from samestep.launch.commands.rank_command import RankCommand, is_script
from samestep.launch.commands.size import Size
from samestep.launch.commands.summary import Rows
from samestep.launch.commands.torchrun import TorchrunCommand, check_nodes, check_restarts
from samestep.parsing.files import is_file
from samestep.parsing.python_text import parse_python

RUNNER = "samestep.launch.run.plain_rank"
"""The module that runs a script as a rank and reports how it ends."""
_SECONDS_TO_STOP = 30.0
_MOST_MODULES = 1000
"""Files that are looked into before a script counts as one that opens no run."""


@dataclass(frozen=True)
class PlainScript:
    """A script, or a module, and its own arguments."""

    name: str
    """The script's path, or the module's name."""
    is_module: bool = False
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Return them as they follow `python`."""
        return (*(("-m",) if self.is_module else ()), self.name, *self.arguments)

    @property
    def run_name(self) -> str:
        """Return what its folder of output is called."""
        last = self.name.rpartition(".")[2] if self.is_module else Path(self.name).stem
        return re.sub(r"[^A-Za-z0-9_-]|^-", "_", last)[:100]


def opens_run(script: Path) -> bool:
    """Return whether a script opens a run by `samestep.start`, itself or in modules beside it.

    They are read, and not run. A script that has this done by a package that is installed is started
    like any other one, and its `samestep.start` finds itself in a rank.
    """
    waiting, seen = [script], {script}
    while waiting and len(seen) <= _MOST_MODULES:
        module = waiting.pop(0)
        try:
            nodes = list(ast.walk(parse_python(module)))
        except TextError:
            continue  # whoever runs it explains that
        if _calls_start(nodes):
            return True
        found = [path for path in _modules_beside(script, module, nodes) if path not in seen]
        waiting += found
        seen |= set(found)
    return False


def _calls_start(nodes: Sequence[ast.AST]) -> bool:
    imports = {
        name.partition(".")[0]
        for node in nodes
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    named = any(
        (isinstance(node, ast.Attribute) and node.attr == "start")
        or (isinstance(node, ast.alias) and node.name in ("start", "*"))
        for node in nodes
    )
    return "samestep" in imports and named


def _modules_beside(script: Path, module: Path, nodes: Sequence[ast.AST]) -> Iterator[Path]:
    """Files in the script's folder that one of its modules imports."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(script.parent, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import starts at the module's own package, or at one of those around it.
            base = [script.parent, *module.parents][min(node.level, len(module.parents))]
            inner = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
            names = [(base, name) for name in [node.module or "", *inner] if name]
        else:
            continue
        for base, name in names:
            path = base.joinpath(*name.split("."))
            yield from filter(is_file, (path.with_suffix(".py"), path / "__init__.py"))


@dataclass(frozen=True)
class PlainCommand(TorchrunCommand):
    """Processes of a script that knows nothing of samestep, one per rank."""

    plain: PlainScript = PlainScript("")
    keeps_logs: ClassVar[bool] = False

    @property
    def rank_argv(self) -> tuple[str, ...]:
        return (self.rank_command.python, *interpreter_words(RUNNER), *self.plain.words)

    @property
    def patience(self) -> float:
        return _SECONDS_TO_STOP

    def summary(self) -> Rows:
        return [
            ("output of the ranks", self.folder),
            ("machines", 1 if self.nodes is None else self.nodes.most),
            ("ranks", self.world),
            ("threads for each rank", self.threads),
        ]

    def _for_torchrun(self) -> tuple[str, ...]:
        return self.plain.words


def plain_command(
    script: PlainScript,
    nproc: Size,
    *,
    nodes: Size | None = None,
    node_rank: int | None = None,
    rendezvous: str = "",
    max_restarts: int = 0,
) -> PlainCommand:
    """Return the processes that run a script on `nproc` ranks of this machine, and of other ones."""
    if nproc.fewest < 1:
        raise LaunchError(f"--nproc is {nproc}: start at least one rank")
    if not script.is_module and not Path(script.name).is_file():
        raise LaunchError(f"{script.name}: no such file. Give a config, or a script")
    threads = requested_threads(process_environment())
    command = PlainCommand(
        RankCommand(Config(name=script.run_name), Path(script.name)),
        nproc=nproc.most,
        # As torchrun does. A run that the script opens after all decides its threads itself.
        threads=1 if threads is None else threads.value,
        min_nproc=nproc.fewest,
        max_restarts=max_restarts,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=rendezvous,
        plain=script,
    )
    check_restarts(command, nproc)
    check_nodes(command)
    return command


def is_plain(file: Path) -> bool:
    """Return whether what is to be launched is a script that opens no run."""
    return is_script(file) and not opens_run(file)
