"""Imports a Python file that a config names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from samestep.errors import TaskError

_MARK = "__samestep_task__"
"""On modules that were imported here: another file of that name may follow them."""


def import_file(path: Path, key: str, *, again: bool = True) -> Any:
    """Import a file under its own name, so that loader processes can import it too.

    Args:
        path: The file.
        key: The config's key that names it.
        again: Whether to run a file that was imported before; False takes it as it is.
    """
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and not hasattr(known, _MARK):
        raise TaskError(f"{key}: {path} has the name of a module that is already imported ({name}): rename it")
    if known is not None and not again and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{key}: {path} is not a Python file")
    sys.path[:] = [str(path.parent), *(p for p in sys.path if p != str(path.parent))]
    module = importlib.util.module_from_spec(spec)
    setattr(module, _MARK, True)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
