"""samestep tune lanes as a person types it, in real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.cli.starter import write_starter
from tests.cli.processes import samestep, started, wait_for

QUICK = ("--rounds", "2", "--steps", "2")


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config; its commands keep their temporary files in `temporary`."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    write_starter(tmp_path / "mine")
    return tmp_path / "mine" / "config.yaml"


def left(folder: Path) -> list[str]:
    """Everything that commands have left there; torch has a folder of its own."""
    found = folder.rglob("*")
    names = (str(path.relative_to(folder)) for path in found)
    return sorted(n for n in names if "torchinductor" not in n and "__pycache__" not in n)


def test_it_shows_a_table_and_recommends(starter: Path, tmp_path: Path) -> None:
    before, page = left(tmp_path), tmp_path / "lanes.html"
    done = samestep("tune", "lanes", starter, *QUICK, "--lanes", "1,8", "--report", page, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("1 lane ", "8 lanes", "global batch 64 on cpu", "Recommended: "):
        assert words in done.stdout
    assert "16 lanes" not in done.stdout
    assert "Plan:" not in done.stderr, "the runs' own logs are not shown"
    assert f"Page: {page}" in done.stderr
    assert "Recommended: " in page.read_text()
    page.unlink()
    assert left(tmp_path) == before


def test_json_has_the_usual_numbers_and_the_configs_own(starter: Path, tmp_path: Path) -> None:
    done = samestep("tune", "lanes", starter, "lanes=32", *QUICK, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["lanes"] for row in found["measured"]] == [1, 2, 4, 8, 16, 32]
    assert all(len(row["seconds"]) == 2 for row in found["measured"])
    assert min(row["cost"] for row in found["measured"]) == 1.0
    assert found["now"] == 32
    assert found["recommended"]["lanes"] in (1, 2, 4, 8, 16, 32)


def test_ranks_are_started_for_each_world(starter: Path, tmp_path: Path) -> None:
    before = left(tmp_path)
    done = samestep(
        "tune", "lanes", starter, "lanes=1", *QUICK, "--lanes", "1,2,4", "--worlds", "1,2", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    measured = [(row["world"], row["lanes"]) for row in found["measured"]]
    assert measured == [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)]
    assert found["recommended"]["lanes"] in (2, 4), "one lane does not run on two ranks"
    assert "measuring on 2 ranks" in done.stderr
    assert left(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lanes", "1,x"], "--lanes is '1,x': give numbers from 1 on"),
        (["--lanes", "5"], "global_batch 64 cannot be cut into 5 equal lanes"),
        (["--lanes", "1", "--worlds", "2"], "2 ranks need 2 lanes or more"),
        (["--rounds", "0"], "--rounds"),
        (["global_batch=null", "lanes=null", "batch_per_rank=4"], "there is nothing to choose"),
        (["distributed.world_size=2"], "pass distributed.world_size=auto"),
        (["--report", "mine/task.py"], "is no page of samestep"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_measured(
    starter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = left(tmp_path)
    done = CliRunner().invoke(app, ["tune", "lanes", str(starter), *words])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output
    assert left(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["global_batch=4096"], "the training data has 2000 samples"),
        (["--parallel", "2", "--worlds", "2"], "this rank runs on cpu"),
    ],
)
def test_what_only_a_rank_can_find_has_the_same_code(
    starter: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    before = left(tmp_path)
    done = samestep("tune", "lanes", starter, *words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert left(tmp_path) == before


def test_a_signal_stops_it_and_nothing_is_left(starter: Path, tmp_path: Path) -> None:
    before, temporary = left(tmp_path), tmp_path / "temporary"
    with started("tune", "lanes", starter, "--steps", "100000", cwd=tmp_path) as process:
        wait_for(lambda: bool(list(temporary.glob("samestep-bench-*/1/metrics.jsonl"))))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
        assert process.stdout is not None
        assert "SIGTERM stopped the measurement: nothing is kept" in process.stdout.read()
    assert left(tmp_path) == before
