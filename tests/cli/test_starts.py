"""Commands that only look answer at once: they do not import torch, which takes seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from samestep.environment.hardware import expects_gpu
from samestep.environment.variables import process_environment
from tests.cli.processes import run, samestep

COLD = "what it imports is what is tested"
WATCHED = """
import sys
from samestep.cli import app
try:
    app({words!r}, standalone_mode=False)
finally:
    watched = ("torch", "numpy", "torchmetrics", "safetensors", *["pydantic"] * ({words!r} == ["--help"]))
    heavy = [name for name in watched if name in sys.modules]
    print("\\nimported:", heavy, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a config, and a run that has checkpoints."""
    path = tmp_path_factory.mktemp("looked-at")
    assert samestep("init", "mine", cwd=path).returncode == 0
    assert samestep("train", "mine/config.yaml", "epochs=1", cwd=path).returncode == 0
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        ["launch", "--help"],
        ["show", "runs/mine"],
        ["show", "runs/mine", "--verify", "--json"],
        ["runs"],
        ["show", "mine/config.yaml"],
        ["check", "--facts"],
        ["check"],
        ["check", "mine/task.py"],
        ["plot", "runs/mine", "--report", "c.html"],
        ["launch", "mine/config.yaml", "--print"],
    ],
    ids=" ".join,
)
def test_what_only_looks_imports_no_torch(folder: Path, words: list[str]) -> None:
    if expects_gpu(process_environment()) and words[-1] in ("mine/config.yaml", "--facts", "check", "--print"):
        pytest.skip("only torch can describe the GPUs of this machine")
    done = run([sys.executable, "-c", WATCHED.format(words=words)], cwd=folder, cold=COLD)
    assert done.stderr.endswith("imported: []\n"), done.stderr


def test_torch_and_its_files_say_the_same(folder: Path) -> None:
    if expects_gpu(process_environment()):
        pytest.skip("only torch can describe the GPUs of this machine")
    text = "import torch\n" + WATCHED.format(words=["check", "--facts", "--json"])
    asked = run([sys.executable, "-c", text], cwd=folder, cold=COLD)
    looked = samestep("check", "--facts", "--json", cwd=folder, cold=COLD)
    with_torch, without = json.loads(asked.stdout), json.loads(looked.stdout)
    assert "torch" in asked.stderr
    assert {key: fact["value"] for key, fact in with_torch.items()} == {
        key: fact["value"] for key, fact in without.items()
    }
