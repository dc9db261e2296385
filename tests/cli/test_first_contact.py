"""What people do first with a script of their own: an ordinary loader, an edit, another start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.processes import command, run, samestep

SCRIPT = """
import sys, torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import samestep

run = samestep.start(epochs=3, seed=0, name="mine", distributed={"device": "cpu", "threads_per_rank": 1})
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.arange(480.0).view(120, 4).sin(), torch.arange(120) % 2
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, num_workers=2, drop_last=True,
                    pin_memory=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs():
    for x, y in loader:
        optimizer.zero_grad()
        loss = run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
    run.print(f"epoch {epoch}", *sys.argv[1:])
"""


def python(folder: Path, *words: str, **variables: str) -> tuple[str, str]:
    """Run the script as `python train.py`; what it printed, and its messages."""
    done = run([sys.executable, "train.py", *words], cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_an_error_shows_the_lines_of_the_script_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x[:, 1:]), y)")
    )
    for words in ([sys.executable, "train.py"], [*command("train", "train.py")]):
        done = run(words, cwd=tmp_path)
        assert done.returncode == 1
        trace = done.stderr[done.stderr.index("Traceback") :]
        assert "F.cross_entropy(model(x[:, 1:]), y)" in trace
        assert "frames of samestep and torch left out" in trace
        assert "loop_body.py" not in trace
        assert "mat1 and mat2 shapes cannot be multiplied" in trace


def test_a_script_that_was_edited_is_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert python(tmp_path)[0] == "epoch 0\nepoch 1\nepoch 2\n"
    out, err = python(tmp_path)
    assert not out
    assert "The run is complete: 9 steps. Nothing to train" in err
    (tmp_path / "train.py").write_text(SCRIPT.replace("1e-3", "1e-2"))
    out, err = python(tmp_path)
    assert "runs/mine is complete, and train.py has changed since: this is another run, runs/mine-2" in err
    assert out.startswith("epoch 0\n")
    assert not python(tmp_path)[0], "the edited one is complete now, too"
    kept = python(tmp_path, SAMESTEP_ARGS="resume.allow=[code]")
    assert not kept[0]
    assert "mine-2" not in kept[1]


def test_other_arguments_are_another_run_and_overrides_come_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    python(tmp_path, "--lr", "1")
    _, err = python(tmp_path, "--lr", "2")
    assert "runs/mine was trained by train.py --lr 1, not train.py --lr 2" in err
    out, _ = python(tmp_path, "--lr", "1", SAMESTEP_ARGS="resume=never epochs=1")
    assert out == "epoch 0 --lr 1\n"
    wrong = run([sys.executable, "train.py"], cwd=tmp_path, SAMESTEP_ARGS="a='")
    assert "SAMESTEP_ARGS" in wrong.stderr
    assert wrong.returncode != 0


OWN_AVERAGE = SCRIPT.replace(
    "for epoch in run.epochs():", "ema = [p.detach().clone() for p in model.parameters()]\nfor epoch in run.epochs():"
).replace(
    "        optimizer.step()\n",
    "        optimizer.step()\n        for e, p in zip(ema, model.parameters()):\n            e.lerp_(p.detach(), {rate})\n",
) + '''
if run.is_main:
    torch.save({"ema": ema}, "ema.pt")
    with open("log.txt", "w") as log:
        log.write(f"{run.world_size} ranks")
'''  # fmt: skip


def test_verify_looks_at_an_average_that_the_loop_keeps_by_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_AVERAGE.replace("{rate}", "0.5 / run.world_size"))
    words = ("verify", "train.py", "name=other", "--worlds", "1,2", "--steps", "4", "--json")
    done = samestep(*words, cwd=tmp_path)
    found = json.loads(done.stdout)["worlds"]["2"]
    assert done.returncode == 4, done.stderr
    assert found["first_difference"]["what"] == "what the script saves"
    assert found["first_difference"]["tensor"].startswith("ema.pt:ema.")
    assert "other content to log.txt" in found["note"]
    (tmp_path / "train.py").write_text(OWN_AVERAGE.replace("{rate}", "0.5"))
    assert samestep(*words, cwd=tmp_path).returncode == 0


def test_a_collective_of_one_rank_alone_is_named_within_seconds(tmp_path: Path) -> None:
    """Not after distributed.timeout, which is ten minutes."""
    once = SCRIPT.replace(
        '    run.print(f"epoch {epoch}", *sys.argv[1:])\n', "    if run.is_main:\n        run.reduce(1)\n"
    )
    assert once != SCRIPT
    (tmp_path / "train.py").write_text(once)
    done = samestep("launch", "train.py", "--nproc", "2", cwd=tmp_path, seconds=120)
    assert done.returncode == 1
    assert "the ranks called different collectives as #" in done.stderr
    assert "rank 0 called gather" in done.stderr
    assert "none of them behind `if run.is_main:`" in done.stderr
    assert "run.reduce(1)" in done.stderr, "the line of the script"


@pytest.mark.variation("test_verify_looks_at_an_average_that_the_loop_keeps_by_itself: by mpirun")
@pytest.mark.needs("mpirun")
def test_a_script_that_leaves_its_batch_to_the_loader_is_verified_by_mpirun(tmp_path: Path) -> None:
    """Nobody has made the run's directory before its recorder, as a launcher of ours does."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = samestep("verify", "train.py", "--worlds", "1,2@mpirun", "--steps", "2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["worlds"]) == {"1", "2 mpirun"}
