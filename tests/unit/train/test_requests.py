"""What a command hands to the run that a script opens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from samestep.config import load_config
from samestep.errors import StepError, Stopped, TaskError
from samestep.train.record import RunRecord
from samestep.train.requests import Observation, ScriptRequest, run_script
from tests.unit.train.own_loops import settings

SCRIPT = """
import sys
import samestep
from tests.unit.train.own_loops import settings, train

for folder in sys.argv[1:]:
    config = settings(folder)
    if folder.endswith("object"):
        config = samestep.load_config(config)
    with samestep.start(config, ["seed=4"]) as run:
        print(run.config.seed, run.config.loader.workers, __name__, sys.path[0])
        train(run)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("form", ["mapping", "object"])
def test_a_script_runs_as_by_itself_with_the_commands_overrides_last(
    script: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sys.argv, sys.path
    request = ScriptRequest(["seed=5", "loader.workers=0"])
    run_script(script, [str(tmp_path / form)], request)
    assert capsys.readouterr().out == f"5 0 __main__ {script.parent}\n"
    assert (sys.argv, sys.path) == before
    assert request.opened == [tmp_path / form]


def test_a_script_is_recorded_stopped_and_resumed(script: Path, tmp_path: Path) -> None:
    run, record = [str(tmp_path / "run")], tmp_path / "record"
    with pytest.raises(Stopped, match="after step 2"):
        run_script(script, run, ScriptRequest((), Observation(record, stop_after=2)))
    assert not (record / "record.json").exists()
    run_script(script, run, ScriptRequest((), Observation(record)))
    found = RunRecord.read(record)
    assert (found.start, found.steps) == (2, 6)


def test_a_script_of_two_runs_takes_overrides_and_no_record(script: Path, tmp_path: Path) -> None:
    runs = [str(tmp_path / name) for name in ("a", "b")]
    request = ScriptRequest(["epochs=1"])
    run_script(script, runs, request)
    assert len(request.opened) == 2
    with pytest.raises(StepError, match=r"opens a second run, in .*b2, after that in .*a2"):
        run_script(script, [f"{run}2" for run in runs], ScriptRequest((), Observation(tmp_path / "record")))


def test_a_script_can_be_asked_for_its_config(script: Path, tmp_path: Path) -> None:
    request = ScriptRequest(["lanes=2"], describe=tmp_path / "config.json")
    with pytest.raises(SystemExit) as ended:
        run_script(script, [str(tmp_path / "run")], request)
    assert ended.value.code == 0
    assert not (tmp_path / "run").exists()
    expected = load_config(settings(tmp_path / "run"), ["seed=4", "lanes=2"])
    assert load_config(tmp_path / "config.json").model_dump() == expected.model_dump()


def test_a_script_must_exist_and_open_a_run(script: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such file"):
        run_script(tmp_path / "no.py", [], ScriptRequest())
    with pytest.raises(TaskError, match=r"without calling samestep\.start"):
        run_script(script, [], ScriptRequest())
