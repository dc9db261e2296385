"""The installed torch, read from its files: importing it takes seconds. No torch here."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from samestep.errors import TextError
from samestep.parsing.python_text import parse_python


@dataclass(frozen=True)
class TorchBuild:
    """The contents of torch's own version file."""

    version: str
    cuda: str | None
    """The CUDA that it is built with."""
    hip: str | None
    """The ROCm that it is built with."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Return those of nccl and gloo that such a build has."""
        return ("nccl", "gloo") if self.cuda or self.hip else ("gloo",)


def installed_torch() -> TorchBuild | None:
    """Return the torch that would be imported; None if there is none, or its file says something else."""
    spec = find_spec("torch")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        try:
            found = _constants(parse_python(Path(folder) / "version.py"))
        except TextError:
            continue
        build = TorchBuild(found.get("__version__", ""), found.get("cuda"), found.get("hip"))
        texts = (build.version, build.cuda or "", build.hip or "")
        if build.version and all(isinstance(text, str) for text in texts):
            return build
    return None


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the names that a module sets to constants."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Constant):
            for target in targets:
                if isinstance(target, ast.Name):
                    found[target.id] = node.value.value
    return found
