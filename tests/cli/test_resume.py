"""`samestep resume`, as the message of an interrupted run says it; with real ranks."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.cli.processes import TASKS, samestep, started, wait_for
from tests.cli.test_stopping import PATIENCE, SAVED, losses, steps_done, untouched

__all__ = ["untouched"]

SCRIPT = """
import argparse, time
from pathlib import Path
import samestep, torch

parser = argparse.ArgumentParser()
parser.add_argument("--hurry", type=Path)
given = parser.parse_args()
with samestep.start({"steps": 30, "global_batch": 8, "name": "scripted", "log_every": 1,
                     "distributed": {"threads_per_rank": 1, "timeout": 600}}) as run:
    model = torch.nn.Linear(2, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps([torch.tensor([i / 7, 1.0]) for i in range(64)]):
        step.train(lambda batch: (model(batch.data).square().sum(), len(batch)))
        while step.index >= 4 and not given.hurry.exists():
            time.sleep(0.01)
            if Path("stop").exists():
                break
"""


def line_in(output: str) -> list[str]:
    """The command that the message of an interrupted run ends with."""
    found = re.search(r"resumes from there with: samestep (resume .+)$", output, re.MULTILINE)
    assert found is not None, output
    return shlex.split(found[1])


def test_an_interrupted_launch_is_resumed_by_its_own_line(tmp_path: Path, untouched: list[float]) -> None:
    config, run = tmp_path / "slow.yaml", tmp_path / "runs" / "slow"
    config.write_text(
        "include: below.yaml\nplatforms: {local: above.yaml}\nsteps: 7\n"
        f"params: {{seconds: 0.06, hurry: {tmp_path / 'hurry'}}}\nlog_every: 1\n"
    )
    below, above = tmp_path / "below.yaml", tmp_path / "above.yaml"
    below.write_text(f"task: {TASKS}:Slow\nglobal_batch: 32\nlanes: 8\nsteps: 3\n")
    above.write_text("distributed: {threads_per_rank: 1, timeout: 600}\n")
    words = ("launch", config, "steps=60", "resume=never", "--nproc", "2")
    with started(*words, cwd=tmp_path) as process:
        wait_for(lambda: steps_done(run) >= 4)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == SAVED, output
    assert line_in(output) == ["resume", "runs/slow"]
    assert steps_done(run) < 60
    (tmp_path / "hurry").touch()
    assert "Platform local (no Kaggle or Colab variable is set): above.yaml sets" in output
    for file in (config, below, above):
        file.unlink()  # the run has its config
    done = samestep(*line_in(output), "loader.workers=0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "at world size 2; now 2" in done.stderr
    assert losses(run) == untouched
    again = samestep("resume", run, cwd=tmp_path.parent)
    assert again.returncode == 0, again.stderr
    assert "The run is complete: 60 steps" in again.stderr


@pytest.mark.variation("test_an_interrupted_launch_is_resumed_by_its_own_line: of a script")
def test_an_interrupted_script_is_resumed_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "my train.py").write_text(SCRIPT)
    run, hurry = tmp_path / "runs" / "scripted", tmp_path / "hurry up"
    words = ("train", "my train.py", "seed=3", "--stop-after", "4", "--", "--hurry", hurry)
    first = samestep(*words, cwd=tmp_path)
    assert first.returncode == SAVED, first.stderr
    hurry.touch()
    (tmp_path / "elsewhere").mkdir()
    done = samestep(*line_in(first.stderr)[:1], run, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    resumed = losses(run)
    assert len(resumed) == 30
    whole = samestep("train", "my train.py", "seed=3", "name=whole", "--", "--hurry", hurry, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert resumed == losses(tmp_path / "runs" / "whole")
    (tmp_path / "my train.py").write_text(SCRIPT + "# edited")
    edited = samestep("resume", run, cwd=tmp_path)
    assert edited.returncode == 2
    assert "would run the script" in edited.stderr
    assert "If you have edited it yourself" in edited.stderr
    assert samestep("resume", run, "--trust", cwd=tmp_path).returncode == 0


def test_a_referred_variable_reaches_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "S3CR3T")
    (tmp_path / "task.py").write_text(
        "import os\nfrom pathlib import Path\nfrom tests.distributed.tasks import Slow\n"
        "class Told(Slow):\n"
        "    def model(self):\n"
        "        Path(f'told-{os.environ[\"RANK\"]}').write_text(os.environ['MY_TOKEN'] + os.environ['COPY'])\n"
        "        return super().model()\n"
    )
    config = tmp_path / "c.yaml"
    config.write_text(
        "task: task.py:Told\nglobal_batch: 32\nlanes: 8\nsteps: 2\nparams: {seconds: 0.0}\n"
        "launch: {environment: {MY_TOKEN: '${MY_TOKEN}', COPY: '${OMP_NUM_THREADS}'}}\n"
        "distributed: {threads_per_rank: 1}\n"
    )
    done = samestep("launch", config, "--nproc", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"told-{rank}").read_text() for rank in (0, 1)] == ["S3CR3T1"] * 2
    kept = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(kept) > 5
    assert not [path for path in kept if b"S3CR3T" in path.read_bytes()]
    unset = samestep("launch", config, "--nproc", "2", "launch.environment.COPY=${NOWHERE}", cwd=tmp_path)
    assert unset.returncode == 2
    assert "launch.environment.COPY is ${NOWHERE}, and NOWHERE is not set here" in unset.stderr
    assert "Traceback" not in unset.stderr
