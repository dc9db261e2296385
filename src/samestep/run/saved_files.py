"""The files that a script writes besides its run: what is in them, for verify to compare.

A script may keep state that the run does not know, an average of its weights for example, and save
it by itself. On another number of ranks that would differ, and nothing of the run would show it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from samestep.checkpoint.files import sha256_of, write_whole
from samestep.errors import TextError
from samestep.parsing.json_text import read_json
from samestep.run.state_tensors import digest_of, leaf_tensors, module_tensors

_LARGEST = 1 << 30
"""Bytes of a file up to which it is read again."""
_NOT_THEIRS = ("__pycache__", "site-packages", ".git")


@dataclass(frozen=True)
class Saved:
    """The files that the ranks of one run have written."""

    tensors: Mapping[str, str] = field(default_factory=dict)
    """Digests of what was given to torch.save and safetensors, by file and name."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Digests of all other files in the working directory."""

    @classmethod
    def read(cls, record: Path) -> Saved:
        """Return what is in a record's folder; nothing if it says nothing."""
        tensors: dict[str, str] = {}
        files: dict[str, str] = {}
        for path in sorted(record.glob("saved-*.json")):
            try:
                document = read_json(path)
                tensors |= document["tensors"]
                files |= document["files"]
            except (TextError, KeyError, TypeError):
                continue
        return cls(tensors, files)


class SavedFiles:
    """Follows what this process writes until it ends, and writes digests of it into a record's folder."""

    def __init__(self, record: Path, run_dir: Path, rank: int) -> None:
        self._output = record.resolve() / f"saved-{rank}.json"
        self._here, self._run_dir = Path.cwd().resolve(), run_dir.resolve()
        self._tensors: dict[str, str] = {}
        self._opened: set[str] = set()
        torch.save = self._noting(torch.save, "f")
        safetensors.torch.save_file = self._noting(safetensors.torch.save_file, "filename")
        sys.addaudithook(self._hear)
        # Also in processes that multiprocessing forked, and after the run is closed.
        Finalize(None, self._write, exitpriority=-10)

    def _noting(self, save: Callable[..., Any], where: str) -> Callable[..., Any]:
        @wraps(save)
        def noting(content: Any, *args: Any, **options: Any) -> Any:
            target = args[0] if args else options.get(where)
            name = self._name(getattr(target, "name", target))
            if name is not None:
                self._tensors |= _digests(name, content)
            return save(content, *args, **options)

        return noting

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes) and _writes(arguments):
            self._opened.add(os.fsdecode(arguments[0]))

    def _name(self, target: Any) -> str | None:
        """Return a file's path in the working directory; None if it is the run's, or lies elsewhere."""
        if not isinstance(target, str | os.PathLike):
            return None
        path = Path(os.fspath(target)).resolve()
        if not path.is_relative_to(self._here) or path.is_relative_to(self._run_dir):
            return None
        inside = path.relative_to(self._here)
        return None if set(_NOT_THEIRS) & set(inside.parts) else inside.as_posix()

    def _write(self) -> None:
        files: dict[str, str] = {}
        known = {name.partition(":")[0] for name in self._tensors}
        for opened in sorted(self._opened):
            name = self._name(opened)
            path = None if name is None else self._here / name
            if path is None or name in known or not path.is_file():
                continue
            if path.stat().st_size <= _LARGEST:
                files[str(name)] = sha256_of(path)
        if (files or self._tensors) and self._output.parent.is_dir():
            document = {"tensors": self._tensors, "files": files}
            write_whole(self._output, json.dumps(document))


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _digests(name: str, content: Any) -> dict[str, str]:
    state = module_tensors(content) if isinstance(content, nn.Module) else content
    return {f"{name}:{key}": digest_of(value) for key, value in leaf_tensors("", state)}
