"""Imports what runs need, once, and forks a process for each command that it is sent.

Only a process with one thread can be forked safely, and none that has used CUDA: the server checks
both before it offers anything, and computes nothing itself. A forked process is handed over to the
one that requested it, whose child it is like any that it started itself; it ends with it, too, and not
with the server.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from samestep.environment.variables import process_environment
from samestep.errors import TextError
from samestep.launch.forkserver.client import ForkClient
from samestep.launch.forkserver.forked import FORKED, ForkedInfo, Imported, become_request, run_and_leave
from samestep.launch.forkserver.requests import ForkRequest, receive, send, set_process_title
from samestep.parsing.python_text import parse_python

OURS = (
    "samestep.train.train_once", "samestep.launch.run.agent", "samestep.launch.run.prepare", "torch._dynamo",
    "torch.distributed.launcher.api",
)  # fmt: skip
"""What every run imports, with what the first optimizer of a process does."""

Run = Callable[[Sequence[str]], object]
"""Runs a command line of ours in this process."""


def serve(channel: socket.socket, task: Path | None, threads: int, run: Run) -> NoReturn:
    """Import what runs of a task need, report whether forks are safe, and fork until the channel ends.

    Args:
        threads: What OMP_NUM_THREADS is now, before torch is imported.
    """
    environment = process_environment()
    for module in OURS:
        importlib.import_module(module)
    before = _threads()  # numpy's own can be there, and see to forks themselves
    why = _import_for(task, before) if task is not None else ""
    send(channel, [why or _used_cuda()])
    sys.stdout.flush()  # not once more in every fork
    gc.collect()
    gc.freeze()  # a collection would copy all memory that is shared with the forks
    set_process_title(["samestep", "forks", "warm", "processes"])
    exported = {k: v for k, v in process_environment().items() if environment.get(k) != v}
    _forking(channel, Imported(environment, threads, exported), run)


def _import_for(task: Path, before: int) -> str:
    """Import the installed packages of a task; why its process cannot be forked afterwards."""
    found = TaskImports.of(task)
    for name in found.names:
        try:
            found.load(name)
        except Exception as error:
            # A run may catch this, or fail with it: then it is in its own output.
            print(f"{name} is not imported before the runs: {type(error).__name__}: {error}")
        if _threads() > before:
            return f"importing {name} starts threads, which a forked process would not have"
    return found.hidden_by_imports()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _used_cuda() -> str:
    for path in list(Path("/proc/self/fd").iterdir()):
        if path.is_symlink() and str(path.readlink()).startswith(("/dev/nvidia", "/dev/kfd")):
            return "importing the task's packages uses a GPU, which a forked process could not do again"
    return ""


def _forking(channel: socket.socket, imported: Imported, run: Run) -> NoReturn:
    while True:
        try:
            texts, files = receive(channel)
        except (EOFError, ConnectionError):
            os._exit(0)  # whoever it forks for has ended
        request = ForkRequest.of(texts)
        child = _fork_for_parent(request, files, imported)
        if child:
            send(channel, [str(child)])
            continue
        FORKED.set(ForkedInfo(request, imported, _own_server(request, imported, run)))
        run_and_leave(run, request.words)


def _fork_for_parent(request: ForkRequest, files: Sequence[int], imported: Imported) -> int:
    """Fork a process and leave it to this one's parent; 0 in the process itself.

    This forks twice, and the process in between ends at once: what it started goes to the nearest
    ancestor that takes in orphans, which the parent does meanwhile.
    """
    numbers, number = os.pipe()
    waits, adopted = os.pipe()
    between = os.fork()
    if not between:
        if child := os.fork():
            os.write(number, str(child).encode())
            os._exit(0)
        os.close(adopted)
        os.read(waits, 1)  # until it has its parent, and nobody else holds the other end
        become_request(request, files, imported)
        return 0
    os.waitpid(between, 0)
    child = int(os.read(numbers, 32))
    for file in (numbers, number, waits, adopted, *files):
        os.close(file)
    return child


def _own_server(request: ForkRequest, imported: Imported, run: Run) -> ForkClient | None:
    """Start a copy of this process as it is now, which forks the ranks of a launcher."""
    if request.words[0] != "launch":
        return None
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return ForkClient(ours)
    ours.close()
    with Path(os.devnull).open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    set_process_title(["samestep", "forks", "ranks"])
    _forking(theirs, imported, run)


_MOST_FILES = 200
"""Files of a task that are looked at: in a folder with more, runs import the rest themselves."""


@dataclass(frozen=True)
class TaskImports:
    """The modules that a task's file, and files beside it that it imports, import."""

    task: Path
    names: tuple[str, ...]
    """Modules, or `module:name` for a name of a module; in the order of the files."""

    @classmethod
    def of(cls, task: Path) -> TaskImports:
        """Look at a task's file; one that is no Python has no imports, and its runs tell why."""
        found: dict[str, None] = {}
        seen, waiting = set[Path](), [task]
        while waiting and len(seen) < _MOST_FILES:
            path = waiting.pop(0)
            if path in seen:
                continue
            seen.add(path)
            for name in _imports(path):
                beside = _beside(task.parent, name.partition(":")[0])
                if beside is None:
                    found[name] = None
                else:
                    waiting += beside
        return cls(task, tuple(found))

    def load(self, name: str) -> None:
        """Import one of them; a name of a module may be what makes it import a part of itself."""
        module, _, attribute = name.partition(":")
        loaded = importlib.import_module(module)
        if attribute and not hasattr(loaded, attribute):
            importlib.import_module(f"{module}.{attribute}")

    def hidden_by_imports(self) -> str:
        """Return which file of the task no run could import, since a package of that name already is."""
        for path in sorted(self.task.parent.iterdir()):
            is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
            known = sys.modules.get(path.stem) if is_module else None
            file = str(getattr(known, "__file__", None))
            if known is not None and not file.startswith(str(path.parent)):
                return f"{path} has the name of a package that is imported before it"
        return ""


def _imports(path: Path) -> Iterator[str]:
    """Yield what a file imports when it is imported itself: not what its functions do."""
    try:
        waiting: list[ast.AST] = [parse_python(path)]
    except TextError:
        return
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{alias.name}" for alias in node.names if alias.name != "*")
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _beside(folder: Path, module: str) -> list[Path] | None:
    """Return the files of a module that is the task's own; None if it is none of those."""
    root = module.partition(".")[0]
    if (folder / f"{root}.py").is_file():
        return [folder / f"{root}.py"]
    if (folder / root).is_dir():
        return sorted((folder / root).rglob("*.py"))
    return None
