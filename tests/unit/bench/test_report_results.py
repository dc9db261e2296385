"""Results from files and folders: read, refused, joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samestep.bench.document import Document
from samestep.bench.report.results import Result, machines_of, read_results
from samestep.errors import PlanError, TextError
from tests.unit.bench.results import comm, document, figure, memory, scaling


def written(path: Path, made: Document) -> Path:
    made.write(path)
    return path


def test_files_and_folders_are_read_once_and_other_json_in_a_folder_is_left(tmp_path: Path) -> None:
    first = written(tmp_path / "a.json", document("comm", [comm("broadcast", 2, 1024, 1e-3)]))
    written(tmp_path / "b.json", document("memory", [memory("weights", 12)]))
    (tmp_path / "other.json").write_text('{"mine": 1}')
    found = read_results([first, tmp_path])
    assert [result.file.name for result in found] == ["a.json", "b.json"]


def test_what_holds_no_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file or folder"):
        read_results([tmp_path / "nowhere"])
    with pytest.raises(PlanError, match="folder without results"):
        read_results([tmp_path])
    other = tmp_path / "other.json"
    other.write_text('{"mine": 1}')
    with pytest.raises(TextError, match="holds no result of samestep bench"):
        read_results([other])
    other.write_text("{")
    with pytest.raises(TextError, match=r"other\.json is not valid JSON"):
        read_results([tmp_path])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "holds no fields"),
        ({}, "has world None, which a report"),
        (scaling(1, 1.0) | {"median": 0}, "has median 0"),
        (scaling(1, 1.0) | {"median": float("nan")}, "has median nan"),
        (scaling(1, 1.0) | {"mode": "odd"}, "has mode 'odd'"),
        (scaling(1, 1.0) | {"efficiency": {"median": 1}}, "has efficiency"),
        (scaling(1, 1.0) | {"seconds": [1, "x"]}, r"has seconds \[1, 'x'\]"),
        (scaling(1, 1.0) | {"phases": {"data": 1}}, "has phases"),
        ({"world": 1, "leak": {"leaks": "no"}}, "has leak"),
    ],
)
def test_a_row_that_says_nothing_is_refused_with_its_field(row: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(document("scaling", [scaling(1, 1.0)]).as_json() | {"rows": [row]}))
    with pytest.raises(TextError, match=f"row 1 of kind 'scaling' {message}"):
        read_results([path])


def placed(name: str, rows: list[dict[str, Any]], **facts: Any) -> Result:
    return Result(Path(name), document("scaling", rows, **facts))


def test_worlds_of_several_files_are_one_curve() -> None:
    """Strong: 1 s on one rank, 0.3 s on four: 1 / (4 * 0.3)."""
    alone = placed("one.json", [scaling(1, 1.0)])
    four = placed("four.json", [scaling(4, 0.3)], hosts=["node1", "node2", "node3", "node4"])
    (machine,) = machines_of([alone, four])
    assert machine.facts["hosts"] == ["node1", "node2", "node3", "node4"]
    found = machine.rows("scaling")[1]["efficiency"]
    assert found["median"] == pytest.approx(1 / 1.2)
    assert found["low"] == pytest.approx(0.99 / (4 * 0.303))
    assert found["high"] == pytest.approx(1.01 / (4 * 0.297))


def test_weak_scaling_compares_times_of_as_many_samples_per_rank() -> None:
    rows = [
        scaling(1, 1.0, mode="weak"),
        scaling(4, 1.25, mode="weak", global_batch=256),
        scaling(4, 0.9, mode="weak", global_batch=64),
    ]
    (machine,) = machines_of([placed(f"{number}.json", [row]) for number, row in enumerate(rows)])
    found = [row["efficiency"] for row in machine.rows("scaling")]
    assert found[0] is None
    assert found[1]["median"] == pytest.approx(0.8)
    assert found[2] is None, "16 samples per rank, and nothing smaller to compare with"


def test_curves_of_two_configs_stay_apart() -> None:
    here = placed("a.json", [scaling(1, 1.0), scaling(2, 0.6)], config="one")
    there = placed("b.json", [scaling(2, 0.5), scaling(4, 0.4)], config="other")
    (machine,) = machines_of([here, there])
    found = [row["efficiency"] and row["efficiency"]["median"] for row in machine.rows("scaling")]
    assert found == [None, pytest.approx(1 / 1.2), None, pytest.approx(0.5 / (2 * 0.4))]


def test_a_smaller_world_of_another_file_replaces_what_efficiencies_are_against() -> None:
    """Four and eight ranks measured together, 100 % of four; against one rank they are 0.625."""
    alone = placed("one.json", [scaling(1, 1.0)])
    more = placed("more.json", [scaling(4, 0.4), scaling(8, 0.2, efficiency=figure(1.0))])
    (machine,) = machines_of([alone, more])
    found = [row["efficiency"] for row in machine.rows("scaling")]
    assert [found[1]["median"], found[2]["median"]] == pytest.approx([0.625, 0.625])


def test_other_machines_and_second_measurements_stay_apart() -> None:
    first = placed("first.json", [scaling(1, 1.0)])
    again = placed("again.json", [scaling(1, 1.1)])
    assert [m.label for m in machines_of([first, again])] == ["first", "again"]
    small = placed("small.json", [scaling(4, 0.3)], cpus=4)
    assert [m.label for m in machines_of([first, small])] == ["16 cpus", "4 cpus"]
