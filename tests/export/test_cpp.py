"""The C++ example, built and run on what `samestep export` wrote."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch._dynamo  # the first optimizer does it, and it sets a variable of the environment
from torch import Tensor

from samestep.models.export.export_run import export_run
from tests.distributed.running import train_rank
from tests.recipes.importing import importable

EXAMPLE = Path(__file__).parents[2] / "examples" / "cpp"
METHODS = ("forward", "normalise", "jacobian")
RECIPE = Path(__file__).parents[2] / "recipes" / "emulator"
RECIPE_METHODS = ("forward", "predict", "jac", "jac_physical")
SCALES = {"input_mean": [9.0, -12.0, 1.2], "input_std": [4.0, 8.0, 0.5], "output_mean": [0.5, 0.9], "output_std": [0.2, 0.4]}  # fmt: skip


def build(folder: Path) -> Path:
    """The program; the test is skipped where it cannot be built."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no C++ compiler: {compiler}")
    if not (Path(torch.__file__).parent / "include" / "torch" / "script.h").exists():
        pytest.skip("this torch came without its headers")
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    made = folder / "build"
    # Without optimisation, which takes the compiler longer than the program runs.
    options = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", "-DCMAKE_BUILD_TYPE=None"]
    for command in (["cmake", "-S", EXAMPLE, "-B", made, *options], ["cmake", "--build", made]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return made / "infer"


def numbers_of(output: str, method: str) -> Tensor:
    """What the program printed for a method: a line with its shape, a line with its numbers."""
    lines = output.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{method} ["))
    shape = json.loads(lines[place].removeprefix(method))
    return torch.tensor([float(n) for n in lines[place + 1].split()]).view(shape)


def script_recipe(folder: Path, x: Tensor) -> tuple[Path, dict[str, Tensor]]:
    """The emulator of the recipe, with weights and scales of its own, and what its methods return."""
    torch.manual_seed(0)
    with importable(RECIPE):
        from networks import Emulator

        model = Emulator({"sst": 0, "tair": 1, "hi": 0}, {"aice": 0, "vice": 0}, {"mask": "sea_ice"}, 8, 2)
        for name, values in SCALES.items():
            getattr(model, name).copy_(torch.tensor(values))
        path = folder / "recipe.ts"
        torch.jit.save(torch.jit.script(model), path)
    return path, {method: getattr(model, method)(x).detach() for method in RECIPE_METHODS}


@pytest.mark.requirement("002-P-3")
@pytest.mark.cpp
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_cpp_gives_what_python_gives(tmp_path: Path) -> None:
    """One test, for it builds the program."""
    program = build(tmp_path)
    x = torch.tensor([[14.0, -10.0, 1.5], [3.25, -25.5, 2.5]])
    assert_the_example_is_the_same(program, x, tmp_path)
    assert_the_recipe_is_the_same(program, x, tmp_path)


def infer(program: Path, file: Path, methods: str, x: Tensor) -> subprocess.CompletedProcess[str]:
    numbers = [str(value) for value in x.flatten().tolist()]
    return subprocess.run(
        [program, file, "2x3", methods, *numbers], capture_output=True, text=True, timeout=120, check=False
    )


def assert_the_recipe_is_the_same(program: Path, x: Tensor, tmp_path: Path) -> None:
    file, here = script_recipe(tmp_path, x)
    done = infer(program, file, ",".join(RECIPE_METHODS), x)
    assert done.returncode == 0, done.stderr
    for method, expected in here.items():
        torch.testing.assert_close(numbers_of(done.stdout, method), expected, rtol=1e-6, atol=1e-6)
    for line in ("input_names [sst, tair, hi]", "input_levels [0, 1, 0]", "output_names [aice, vice]", "meta {mask: sea_ice}"):  # fmt: skip
        assert line in done.stdout


def assert_the_example_is_the_same(program: Path, x: Tensor, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_rank(EXAMPLE / "emulator.yaml", None, [f"run_dir={run}", "epochs=1"])
    exported = export_run(run, "torchscript", methods=METHODS[1:])
    done = infer(program, exported.path, ",".join(METHODS), x)
    assert done.returncode == 0, done.stderr
    module = torch.jit.load(exported.path)
    for method in METHODS:
        found, here = numbers_of(done.stdout, method), getattr(module, method)(x)
        torch.testing.assert_close(found, here.detach(), rtol=1e-6, atol=1e-7)
    metadata = json.loads(done.stdout.splitlines()[0].removeprefix("metadata "))
    assert metadata["methods"].keys() == {"normalise", "jacobian"}
    assert metadata["inputs"][0]["shape"] == ["batch", 3]
    assert "input_names [sst, tair, hi]" in done.stdout
    wrong = infer(program, exported.path, "hessian", x)
    assert wrong.returncode == 1
    assert "'hessian' is not defined" in wrong.stderr
