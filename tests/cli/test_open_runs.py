"""Scripts that do not open their run with `with`: it is closed when they end, in whatever way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.processes import run, samestep
from tests.distributed.running import rows_of
from tests.variations import variations

COLD = "what happens when an interpreter ends"
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import samestep

run = samestep.start(steps=3, lanes=4, run_dir="run", log_every=100, on_nonfinite="stop")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.ones(24, 4))
model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=8))
end = sys.argv[1]
for step, (x,) in run.enumerate(loader):
    loss = model(x).square().mean()
    if end == "is no number" and step == 2:
        loss = loss * float("nan")
    run.backward(loss)
    optimizer.step()
    if end == "fails" and step == 1:
        raise ZeroDivisionError("my own bug")
print("through")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(SCRIPT)
    return path


def steps_logged(folder: Path) -> list[int]:
    return [row["step"] for row in rows_of(folder / "run") if "loss" in row]


@pytest.mark.parametrize("by", variations(["python", "launch"], kept=["python"]))
def test_a_run_that_nobody_closes_is_whole_when_the_script_ends(by: str, script: Path, tmp_path: Path) -> None:
    if by == "python":
        done = run([sys.executable, str(script), "well"], cwd=tmp_path, cold=COLD)
    else:
        done = samestep("launch", script, "--nproc", "2", "--", "well", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "through" in done.stdout
    assert "Traceback" not in done.stderr
    assert len(steps_logged(tmp_path)) == 3, "losses that were still on their way are written"


def test_an_error_of_the_script_is_the_runs_on_all_ranks(script: Path, tmp_path: Path) -> None:
    alone = run([sys.executable, str(script), "fails"], cwd=tmp_path, cold=COLD)
    assert alone.returncode == 1
    assert alone.stderr.count("ZeroDivisionError: my own bug") == 1
    done = samestep("launch", script, "--nproc", "2", "--", "fails", cwd=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError: my own bug" in done.stderr[done.stderr.index("samestep: rank") :]


def test_an_error_that_closing_finds_fails_the_process(script: Path, tmp_path: Path) -> None:
    done = run([sys.executable, str(script), "is no number"], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the loss of step 2 is NaN or infinite" in done.stderr
