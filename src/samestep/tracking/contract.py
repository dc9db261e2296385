"""The contract of a tracker, for ours and for users' own; the ids of a run in its trackers. No torch here."""

from __future__ import annotations

import io
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import write_whole
from samestep.parsing.json_text import read_object


@dataclass(frozen=True)
class TrackedRun:
    """The facts of a run that a tracker gets before its first row."""

    name: str
    folder: Path
    """The run's directory."""
    params: Mapping[str, Any]
    """The config by dotted keys; what looks like a secret is `...`."""
    tags: Mapping[str, str]
    start: int
    """The first step that comes: above 0 in a resumed run."""
    id: str | None
    """What was given to `keep_id` when this run began; None in a new one."""
    keep_id: Callable[[str], None]
    """Keeps a text in the run's directory, so that a resumed run can continue what it names."""


class Tracker(ABC):
    """Takes rows of values, on rank 0 alone; every row has a `step`.

    Values are numbers, text, lists and mappings of them, and matplotlib figures; a tracker skips
    what it does not take. Rows of a step may come after those of a later one: measurements are
    read from the device in bulk.

    Example:
        class Printed(samestep.Tracker):
            def write(self, row):
                print(row)
    """

    def start(self, run: TrackedRun) -> None:  # noqa: B027 (nothing to do for many)
        """The run's first row comes next. Not called if there is nothing left to train."""

    @abstractmethod
    def write(self, row: dict[str, Any]) -> None: ...

    def log_file(self, path: Path, name: str) -> None:  # noqa: B027 (nothing to do for many)
        """Take a file of the run, when that has ended by itself.

        Args:
            path: The file.
            name: Its path inside the run's directory.
        """

    def flush(self) -> None:  # noqa: B027 (nothing to do for many)
        """Make what was written readable to others."""

    def close(self) -> None:  # noqa: B027 (nothing to do for many)
        """No row follows."""


def figures_in(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the matplotlib figures of a row. Who has made one has imported it; we need not."""
    module = sys.modules.get("matplotlib.figure")
    if module is None:
        return {}
    return {name: value for name, value in row.items() if isinstance(value, module.Figure)}


def without_figures(row: dict[str, Any]) -> dict[str, Any]:
    """Return what else is in a row."""
    figures = figures_in(row)
    return {name: row[name] for name in row if name not in figures} if figures else row


def figure_image(figure: Any) -> Any:
    """Return a figure as pixels, by the library that matplotlib itself needs for them."""
    from PIL import Image

    file = io.BytesIO()
    figure.savefig(file, format="png")
    return Image.open(file)


def flat_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's numbers and texts by name: an entry of a list or mapping is `NAME/KEY`."""
    return dict(_flat(row, ""))


def _flat(values: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            yield from _flat(dict(enumerate(value)), f"{prefix}{name}/")
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (bool, int, float, str)):
            yield f"{prefix}{name}", value


TRACKER_IDS = "tracker-ids.json"


class TrackerIds:
    """The ids of this run in its trackers, kept with it: a new run in the directory sets the file aside."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> str | None:
        found = read_object(self._path).get(key)
        return found if isinstance(found, str) else None

    def keep(self, key: str, text: str) -> None:
        write_whole(self._path, json.dumps({**read_object(self._path), key: text}, indent=1))
