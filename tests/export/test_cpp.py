"""The C++ example, built and run on what `samestep export` wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor

from samestep.config import load_config
from samestep.distributed.context import create_run_context
from samestep.distributed.hardware import detect_hardware
from samestep.export.export_run import export_run
from samestep.train.train_once import train_once

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"
METHODS = ("forward", "normalise", "jacobian")


def build(folder: Path) -> Path:
    """The program; the test is skipped where it cannot be built."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler: {compiler}")
    if not (Path(torch.__file__).parent / "include" / "torch" / "script.h").exists():
        pytest.skip("this torch came without its headers")
    program = folder / "infer"
    # The script uses the torch of `python`: that must be this one.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [EXAMPLE / "build.sh", program], env={**os.environ, "PATH": path},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return program


def numbers_of(output: str, method: str) -> Tensor:
    """What the program printed for a method: a line with its shape, a line with its numbers."""
    lines = output.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{method} ["))
    shape = json.loads(lines[place].removeprefix(method))
    return torch.tensor([float(n) for n in lines[place + 1].split()]).view(shape)


@pytest.mark.requirement("002-P-3")
@pytest.mark.cpp
@pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated")
def test_cpp_gives_what_python_gives(tmp_path: Path) -> None:
    program = build(tmp_path)
    run = tmp_path / "run"
    config = load_config(EXAMPLE / "emulator.yaml", [f"run_dir={run}", "epochs=1"])
    with create_run_context(config, detect_hardware()) as context:
        train_once(config, context)
    exported = export_run(run, "torchscript", methods=METHODS[1:])
    x = torch.tensor([[14.0, -10.0, 1.5], [3.25, -25.5, 2.5]])

    def infer(methods: str) -> subprocess.CompletedProcess[str]:
        numbers = [str(value) for value in x.flatten().tolist()]
        return subprocess.run(
            [program, exported.path, "2x3", methods, *numbers],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    done = infer(",".join(METHODS))
    assert done.returncode == 0, done.stderr
    module = torch.jit.load(exported.path)
    for method in METHODS:
        found, here = numbers_of(done.stdout, method), getattr(module, method)(x)
        torch.testing.assert_close(found, here.detach(), rtol=1e-6, atol=1e-7)
    metadata = json.loads(done.stdout.splitlines()[0].removeprefix("metadata "))
    assert metadata["methods"].keys() == {"normalise", "jacobian"}
    assert metadata["inputs"][0]["shape"] == ["batch", 3]
    assert "input_names [sst, tair, hi]" in done.stdout
    wrong = infer("hessian")
    assert wrong.returncode == 1
    assert "'hessian' is not defined" in wrong.stderr
