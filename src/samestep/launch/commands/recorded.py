"""The command that started a run, recorded with it: `samestep resume` gives it again. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from samestep.errors import LaunchError, TextError
from samestep.launch.commands.rank_command import argv_for, is_script
from samestep.parsing.json_text import parse_json

VARIABLE = "SAMESTEP_COMMAND"
"""By which a launcher tells its ranks how it was called."""
_DECIDED = ("name", "run_dir", "resume", "resume.checkpoint")


@dataclass(frozen=True)
class RecordedCommand:
    """`samestep train` or `samestep launch`, as it was typed."""

    verb: Literal["train", "launch"]
    file: str
    """The config, or a script that calls `samestep.start`."""
    folder: str
    """Where it was typed."""
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """The launcher's; what observes a run, such as --record, is left out."""
    arguments: tuple[str, ...] = ()
    """A script's own."""

    @property
    def code(self) -> Path | None:
        """The script; None for a config."""
        return Path(self.folder, self.file) if is_script(Path(self.file)) else None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> RecordedCommand | None:
        """Return the command; None for what is none, since whoever has written it may be anyone."""
        try:
            return TypeAdapter(cls).validate_python(document)
        except ValidationError:
            return None

    @classmethod
    def of_launcher(cls, environ: Mapping[str, str], file: Path) -> RecordedCommand | None:
        """Return what the launcher of this process was called with, if it has launched this file.

        A process that a run's own code starts inherits the variable, too.
        """
        try:
            found = cls.from_json(parse_json(environ.get(VARIABLE, "null")))
        except TextError:
            return None
        same = found is not None and Path(found.file) == file and Path(found.folder) == Path.cwd()
        return found if same else None

    def variables(self) -> dict[str, str]:
        """Return what tells the ranks of a launch."""
        return {VARIABLE: json.dumps(self.as_json())}

    def again(self, run: Path, overrides: Sequence[str]) -> list[str]:
        """Return the words that resume the run; a config is the one that the run has recorded.

        Raises:
            LaunchError: if an override would make it another run.
        """
        wrong = [text for text in overrides if text.partition("=")[0] in _DECIDED]
        if wrong:
            raise LaunchError(
                f"{', '.join(wrong)}: samestep resume resumes the run in {run} from its newest "
                "checkpoint. For another run, use samestep train or launch"
            )
        run = run.absolute()
        own = [f"run_dir={json.dumps(str(run), ensure_ascii=False)}", "resume.checkpoint=auto"]
        if self.code is None:
            file, ours = run / "config.json", [*overrides, *own]
        else:
            earlier = [text for text in self.overrides if text.partition("=")[0] not in _DECIDED]
            file, ours = Path(self.file), [*earlier, *overrides, *own]
        return [self.verb, *argv_for(file, ours, self.options, self.arguments)]
