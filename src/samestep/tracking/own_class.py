"""Trackers of the user's own, which a config names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

from samestep.config import Config
from samestep.config.trackers import TrackerClassConfig
from samestep.errors import ConfigError, Mistake
from samestep.parsing.files import is_file
from samestep.parsing.python_file import import_file
from samestep.tracking.contract import Tracker


def make_tracker(config: Config, number: int) -> Tracker:
    """Return the tracker that `trackers.classes` names at a place, made with its arguments.

    What the user's own code raises while it is imported or made is not wrapped.
    """
    entry = config.trackers.classes[number]
    path = f"trackers.classes.{number}"
    found = _find(config, entry, path)
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise _mistake(path, f"{entry.name} is not a subclass of samestep.Tracker")
    try:
        inspect.signature(found).bind(**entry.args)
    except TypeError as error:
        raise _mistake(path, f"{entry.name} does not take its args: {error}") from None
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise _mistake(path, f"{entry.name} must define {missing}")
    return found(**entry.args)


def _find(config: Config, entry: TrackerClassConfig, path: str) -> Any:
    home, _, name = entry.name.rpartition(":")
    if entry.is_file:
        file = (config.folder / home).resolve()
        if not is_file(file):
            raise _mistake(path, f"there is no file {file}: its path is relative to the config")
        module = import_file(file, path, again=False)
    else:
        if not _is_there(home):
            raise _mistake(path, f"there is no module {home}: install it, or write FILE.py:{name} for a file")
        module = importlib.import_module(home)
    if not hasattr(module, name):
        raise _mistake(path, f"{home} has no class {name}")
    return getattr(module, name)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # of its package; of a name that is none
        return False


def _mistake(path: str, message: str) -> ConfigError:
    return ConfigError("the config", [Mistake(f"{path}.name", message)])
