"""Ports ten scripts of public repositories, and shows that each is one training at any size.

    python -m tests.public_scripts.run --sources DIR [--resumed] [--diff] [sam dcgan ...]

DIR holds clones of the repositories, at the commits that `edits.json` names. Their code is not ours, so
only the characters that a port adds are stored, with their places. Two sets of edits are made: *smaller*
(sizes, made-up data, the CPU; also in the original) and *port*, whose lines are counted. Each port is
verified at W = 1, 2 and 4, and with one lane compared with the original, weight by weight.

The scripts import einops, fire, gymnasium, pillow, torchvision, transformers, tyro, wandb and x-transformers.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.public_scripts.made_data import make_data

_HERE = Path(__file__).parent
_SECONDS = 600
_FAR = 1e-6
_CHANGED = {"--dropout=0.1": ["--dropout=0.0"], "--amp": []}
"""Arguments that are other ones where a port is compared with the original: nothing is drawn, nothing cast."""


@dataclass(frozen=True)
class Script:
    """One script of a public repository."""

    name: str
    repository: str
    commit: str
    folder: str
    """Where it is in the repository; copied with all that is below."""
    directory: str
    """Where it is started, below that."""
    script: str
    arguments: Sequence[str]
    files: dict[str, dict[str, Any]]

    def build(self, sources: Path, place: Path) -> tuple[Path, Path]:
        """Return folders with the original, made smaller, and its port."""
        clone = sources / self.repository.split("/")[1]
        if not clone.is_dir():
            sys.exit(f"{clone} is not there: clone github.com/{self.repository} at {self.commit}")
        original, port = place / "original", place / "port"
        for folder in (original, port):
            shutil.copytree(clone / self.folder, folder, ignore=shutil.ignore_patterns(".git"))
            make_data(self.name, folder)
        for file, edits in self.files.items():
            text = _read(original / file)
            if hashlib.sha256(text.encode()).hexdigest() != edits["sha256"]:
                sys.exit(f"{clone}: {file} is another version: check out {self.commit}")
            smaller = edited(text, edits["smaller"])
            _write(original / file, smaller)
            _write(port / file, edited(smaller, edits["port"]))
        return original, port

    def diff(self, original: Path, port: Path) -> list[str]:
        """Return the lines that the port adds and takes away."""
        lines: list[str] = []
        for file in self.files:
            texts = [_read(folder / file).splitlines() for folder in (original, port)]
            found = list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]
            lines += [line for line in found if line[0] in "+-" and line[1:].strip()]
        return lines

    def verify(self, port: Path, options: Sequence[str]) -> dict[str, Any]:
        """Return what `samestep verify` says at W = 1, 2 and 4."""
        command = ["verify", self.script, "--worlds", "1,2,4", "--json", *options, "--"]
        done = self._run(port, ["-m", "samestep", *command, *self.arguments], {})
        try:
            said: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            sys.exit(f"{self.name}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return said

    def distance(self, original: Path, port: Path) -> float:
        """Return how far apart the weights end, with one lane; of each tensor's largest one."""
        arguments = [new for old in self.arguments for new in _CHANGED.get(old, [old])]
        ends, codes = [], []
        for folder in (original, port):
            script, saved = folder / self.directory / self.script, folder.with_suffix(".pt")
            _write(script, with_equal(_read(script)))
            environment = {"EQUAL": str(saved), "SAMESTEP_ARGS": "lanes=1 resume=never"}
            done = self._run(folder, [self.script, *arguments], environment)
            codes.append(done.returncode)
            # With their last weights an original may fail, which the port does then, too.
            if not saved.exists() or codes[0] != done.returncode:
                sys.exit(f"{self.name} in {folder.name}: {done.stderr[-4000:]}")
            ends.append(torch.load(saved, weights_only=True))
        return max(_apart(a, b) for a, b in zip(*ends, strict=True))

    def _run(
        self, folder: Path, command: Sequence[str], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        paths = [str(_HERE / "stand_ins"), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, *command],
            cwd=folder / self.directory,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OMP_NUM_THREADS": "1",
                "MPLBACKEND": "agg",
                "WANDB_MODE": "disabled",
                "TOKENIZERS_PARALLELISM": "false",
                **environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-9))


def edited(text: str, edits: Sequence[tuple[int, int, str]]) -> str:
    """Return a text after edits, each a place in it, how much is removed, and what is added."""
    for at, removed, added in reversed(edits):
        text = text[:at] + added + text[at + removed :]
    return text


def with_equal(text: str) -> str:
    """Import `equal` first, but for what must be first of all."""
    lines = text.splitlines(keepends=True)
    first = [at for at, line in enumerate(lines) if line.startswith("from __future__")]
    lines.insert(first[-1] + 1 if first else 0, "import equal\n")
    return "".join(lines)


def _read(path: Path) -> str:
    with path.open(newline="", encoding="utf-8") as file:
        return file.read()


def _write(path: Path, text: str) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(text)


def scripts() -> list[Script]:
    """Return all ten, with their edits."""
    stored = json.loads((_HERE / "edits.json").read_text(encoding="utf-8"))
    return [Script(name, **entry) for name, entry in stored.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sources", type=Path, required=True, help="where the clones are")
    parser.add_argument("--resumed", action="store_true", help="also stop and resume each port")
    parser.add_argument("--diff", action="store_true", help="show the ports, and run nothing")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    failed = False
    for script in scripts():
        if asked.names and script.name not in asked.names:
            continue
        with tempfile.TemporaryDirectory(prefix="public-script-") as place:
            original, port = script.build(asked.sources, Path(place))
            lines = script.diff(original, port)
            added = sum(line.startswith("+") for line in lines)
            if asked.diff:
                print(f"\n# {script.name}: {added} lines\n" + "\n".join(lines))
                continue
            said = script.verify(port, ["--resumed"] if asked.resumed else [])
            hashes = {size: world["state_hash"] for size, world in said["worlds"].items()}
            verdict = "identical" if said["kept"] else "DIFFERENT"
            print(f"{script.name}: {added} lines; {verdict}: {hashes}", flush=True)
            again = script.build(asked.sources, Path(place) / "again")
            distance = script.distance(*again)
            print(f"  with one lane {distance:g} from the original's weights", flush=True)
            failed = failed or not said["kept"] or distance > _FAR
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
