"""The origin of a run: the command that started it and the code that it runs, signed by its user.

A run's directory may come from anyone, and commands that use its model run its task's code. Only
what this user has started, with a file that has not changed since, is run without being asked for.
A changed script is a new run, with a name of its own beside the run that it was before.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import sha256_of
from samestep.checkpoint.run_result import read_result
from samestep.config import Config
from samestep.environment.launch import detect_launch
from samestep.environment.secret import key_path, make_key, read_key
from samestep.environment.variables import process_environment
from samestep.errors import CheckpointError, NotTrusted, TextError
from samestep.launch.commands.recorded import RecordedCommand
from samestep.parsing.json_text import read_json

ORIGIN = "origin.json"
_COMMAND: ContextVar[RecordedCommand | None] = ContextVar("samestep_command", default=None)


@contextmanager
def started_by(command: RecordedCommand | None) -> Iterator[None]:
    """While entered, runs that are opened record this command."""
    token = _COMMAND.set(command)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def resume_line(config: Config) -> str | None:
    """Return what a person types to resume the run of this process; None if that is not known."""
    known = Origin.of(config).command
    return None if known is None else shlex.join(["samestep", "resume", str(config.run_path)])


@dataclass(frozen=True)
class Origin:
    """The command that started a run, and the file of its own code."""

    command: RecordedCommand | None
    """None where something else started its ranks: then only that can start them again."""
    code: str | None
    """The whole path of the task's file, or of the script; None if neither is known."""
    sha256: str | None
    """Checksum of that file, as it was then."""
    config_sha256: str = ""
    """Checksum of the run's config.json."""
    signature: str = ""

    @classmethod
    def of(cls, config: Config) -> Origin:
        """Return the origin of the run that this process opens with a config."""
        command = _COMMAND.get() or _plain_script()
        code = task_file(config)
        if code is None and command is not None:
            code = command.code
        if code is None or not code.is_file():
            return cls(command, None, None)
        return cls(command, str(code.resolve()), sha256_of(code))

    def text(self, config: str) -> str:
        """Return the content of origin.json, for the text of the run's config.json."""
        whole = replace(self, config_sha256=hashlib.sha256(config.encode()).hexdigest())
        return json.dumps({**whole._content(), "signature": whole._signed(make_key())}, indent=1)

    @classmethod
    def read(cls, run: Path) -> Origin | None:
        """Return the origin that a run's directory states; None if it states none."""
        try:
            document = read_json(run / ORIGIN)
            names = ("code", "sha256", "config_sha256", "signature")
            values = [document[name] for name in names]
            command = RecordedCommand.from_json(document["command"])
        except (TextError, KeyError, TypeError):
            return None
        if not all(value is None or isinstance(value, str) for value in values):
            return None
        return cls(command, values[0], values[1], values[2] or "", values[3] or "")

    def is_signed(self, run: Path) -> bool:
        """Return whether this user has started the run, with the config that is there now."""
        key = read_key()
        try:
            config_sha256 = sha256_of(run / "config.json")
        except OSError:
            return False
        if key is None or config_sha256 != self.config_sha256:
            return False
        return hmac.compare_digest(self._signed(key), self.signature)

    def _content(self) -> dict[str, Any]:
        command = None if self.command is None else self.command.as_json()
        return {"command": command, "code": self.code, "sha256": self.sha256, "config_sha256": self.config_sha256}

    def _signed(self, key: bytes | None) -> str:
        content = json.dumps(list(self._content().values())).encode()
        return "" if key is None else hmac.new(key, content, "sha256").hexdigest()


def task_file(config: Config) -> Path | None:
    """Return the file of a config's task; None if it names none."""
    if config.task is None:
        return None
    return config.folder / config.task.rpartition(":")[0]


def refuse_untrusted_task(run: Path, config: Config, overrides: Sequence[str], trust: bool) -> None:
    """Refuse to run a task's code only because a run's directory names it.

    Raises:
        NotTrusted: with what would be run, and why it is not trusted.
    """
    code = task_file(config)
    if trust or code is None or config.task is None:
        return
    named = any(text.partition("=")[0] == "task" for text in overrides)
    if named and config.distributed.network and _is_foreign(run):
        raise NotTrusted(
            f"{run} sets {', '.join(config.distributed.network)} in distributed.network, which can name "
            f"libraries to load, and is not trusted: {_unsigned()}. Pass distributed.network={{}}, or "
            "--trust (in Python: trust=True)"
        )
    _refuse_untrusted(run, code, f"the class {config.task.rpartition(':')[2]} of", named)


def refuse_untrusted_command(run: Path, origin: Origin, words: Sequence[str]) -> None:
    """Refuse to start again what this user has not started: a config names programs, too."""
    if origin.command is not None and origin.command.code is not None:
        _refuse_untrusted(run, origin.command.code, "the script", named=False)
    if not origin.is_signed(run):
        raise NotTrusted(
            f"{run} would run {shlex.join(['samestep', *words])} in "
            f"{origin.command and origin.command.folder}, which is not trusted: {_unsigned()}. Read "
            f"{run / ORIGIN} and {run / 'config.json'} first; then --trust runs it"
        )


def _refuse_untrusted(run: Path, code: Path, what: str, named: bool) -> None:
    """`named`: whether the user has named the file, and not only the run's directory."""
    path = code.resolve()
    reason = _doubt(run, path, named) if path.is_file() else ""
    if reason:
        raise NotTrusted(
            f"{run} would run {what} {path}, which is not trusted: {reason}. Read that file first; "
            "then --trust runs it (in Python: trust=True)"
        )


def _doubt(run: Path, path: Path, named: bool) -> str:
    if path.is_relative_to(run.resolve()):
        return "it lies inside the run's directory, which may come from anyone"
    if named:
        return ""
    origin = Origin.read(run)
    if origin is None:
        return f"the run has no {ORIGIN} that says what it was started with"
    if not origin.is_signed(run):
        return _unsigned()
    if origin.code != str(path):
        return f"the run was started with {origin.code or 'no file that is known'}"
    if origin.sha256 != sha256_of(path):
        return (
            "it is not what the run was started with. If you have edited it yourself, the model may "
            "not be the one that was trained"
        )
    return ""


def _is_foreign(run: Path) -> bool:
    origin = Origin.read(run)
    return origin is None or not origin.is_signed(run)


def _unsigned() -> str:
    return (
        f"the run was not started by you, or its config.json was changed: {ORIGIN} is not signed by "
        f"your key, {key_path()}"
    )


def _plain_script() -> RecordedCommand | None:
    """Return the script that this process runs, if that is `python script.py` and no rank of a launcher."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None or not file.endswith(".py"):
        return None
    if detect_launch(process_environment()).world > 1:
        return None
    return RecordedCommand("train", file, str(Path.cwd()), arguments=tuple(sys.argv[1:]))


CODE = "code"
"""In `resume.allow`: the code of a run may have changed since."""


def name_for(config: Config, report: Callable[[str], None]) -> str:
    """Return the name of the run that this start belongs to: the config's, or that with a number.

    A run that was interrupted resumes, also with changed code: most often an error was corrected. One
    that is complete would have nothing to train; then changed code is a new run. Other arguments of a
    script are another run in any case.
    """
    decided = config.run_dir is not None or config.resume.checkpoint != "auto"
    if decided or CODE in config.resume.allow:
        return config.name
    now = Origin.of(config)
    why = ""
    for number in count(1):
        name = config.name if number == 1 else f"{config.name}-{number}"
        path = config.model_copy(update={"name": name}).run_path
        reason = _why_another(path, now)
        if not reason:
            if why:
                report(f"{why}: this is another run, {path}. resume.allow=[{CODE}] keeps to the earlier one")
            return name
        why = why or reason
    raise AssertionError("there is always another number")


def _why_another(run: Path, now: Origin) -> str:
    """Return why a start is another run than the one in a directory; empty if it is that run, or there is none."""
    before = Origin.read(run)
    if before is None or now.code is None:
        return ""
    name = Path(now.code).name
    if before.command is not None and now.command is not None and before.code == now.code:
        earlier, arguments = before.command.arguments, now.command.arguments
        if earlier != arguments:
            return f"{run} was trained by {shlex.join([name, *earlier])}, not {shlex.join([name, *arguments])}"
    if (before.code, before.sha256) == (now.code, now.sha256) or not _is_complete(run):
        return ""
    if before.code != now.code:
        return f"{run} is complete, and was trained by {before.code}"
    return f"{run} is complete, and {name} has changed since"


def _is_complete(run: Path) -> bool:
    try:
        result = read_result(run)
    except CheckpointError:
        return False
    return result is not None and result.is_done
