"""The ids of a run in its trackers, kept with it. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep.checkpoint.files import write_whole
from samestep.errors import TextError
from samestep.parsing.json_text import read_json

TRACKER_IDS = "tracker-ids.json"


class TrackerIds:
    """The ids of this run in its trackers, kept with it: a new run in the directory sets the file aside."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, key: str) -> str | None:
        found = self._read().get(key)
        return found if isinstance(found, str) else None

    def keep(self, key: str, text: str) -> None:
        write_whole(self._path, json.dumps({**self._read(), key: text}, indent=1))

    def _read(self) -> dict[str, Any]:
        try:
            document = read_json(self._path)
        except TextError:  # not there yet, or truncated by a crash of the machine
            return {}
        return document if isinstance(document, dict) else {}
