"""A recipe's own modules, as a run imports them: from its folder; and its programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.processes import run


@contextmanager
def importable(recipe: Path) -> Iterator[None]:
    """Makes them importable, and forgets them afterwards: their names are everybody's."""
    modules = [path.stem for path in recipe.glob("*.py")]
    before = {name: sys.modules.pop(name) for name in modules if name in sys.modules}
    sys.path.insert(0, str(recipe))
    try:
        yield
    finally:
        sys.path.remove(str(recipe))
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def program(recipe: Path, name: str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run one of a recipe's own programs."""
    return run([sys.executable, str(recipe / name), *map(str, words)], cwd=cwd)


def fork_commands(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str] = str, codes: Sequence[int] = (0,)
) -> None:
    """Let `subprocess.run` fork its commands from a process that has torch imported; each ends with such a code."""

    def forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        done = run([change(word) for word in command], cwd=options["cwd"])
        assert done.returncode in codes, f"{command}: {done.stdout}\n{done.stderr}"
        return done

    monkeypatch.setattr(subprocess, "run", forked)


def newest(run_dir: Path) -> dict[str, Tensor]:
    """Return the weights of a run's newest checkpoint."""
    return load_file(max((run_dir / "checkpoints").glob("step-*")) / "model.safetensors")
