"""Results in files, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.bench.document import Document, machine_facts, refuse_other_result
from samestep.errors import PlanError, TextError

WHOLE = Document("comm", {"hosts": ["a"]}, [{"bytes": 1024}])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    WHOLE.write(tmp_path / "comm.json")
    assert Document.read(tmp_path / "comm.json") == WHOLE
    refuse_other_result(tmp_path / "comm.json")
    refuse_other_result(tmp_path / "new.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "holds no result of samestep bench"),
        ("[1]", "holds no result of samestep bench"),
        (json.dumps({**WHOLE.as_json(), "version": 99}), "has version 99"),
        (json.dumps({**WHOLE.as_json(), "rows": None}), "is incomplete"),
    ],
)
def test_other_files_are_no_results_and_are_not_replaced(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(TextError, match=message):
        Document.read(path)
    with pytest.raises(PlanError, match="exists and is no result"):
        refuse_other_result(path)


def test_a_folder_that_does_not_exist_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no directory"):
        refuse_other_result(tmp_path / "nowhere" / "comm.json")


def test_the_machine_is_known_by_what_figures_depend_on() -> None:
    facts = machine_facts("cpu", ["b", "a", "b"])
    assert facts["hosts"] == ["a", "b"]
    assert {"device", "cpus", "torch", "python", "samestep"} <= facts.keys()
