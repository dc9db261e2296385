"""The report as a page, tables and a picture; and as a command."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.bench import kinds
from samestep.bench.document import Document
from samestep.bench.presentation import Presentation, Table
from samestep.bench.scaling_panels import efficiency_panels, phase_panels
from samestep.cli import app
from tests.unit.bench.results import comm, document, figure, leak, machine, memory, scaling

EVIL = "</script><b>[red]x"


def _plain(found: Document) -> Presentation:
    rows = [(str(row["world"]), str(row.get("median"))) for row in found.rows]
    return Presentation(f"All of {found.kind}", "as it is", [], [Table("Rows", ("a", "b"), rows)])


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with results of all kinds, each of which can be shown."""
    for kind in ("scaling", "memory"):
        monkeypatch.setitem(kinds._PRESENTED, kind, _plain)  # type: ignore[index]
    phases = {name: figure(0.01) for name in ("data", "compute", "exchange", "update", "wait")}
    documents = [
        document(
            "scaling",
            [
                scaling(1, 0.1, phases=phases, workload=EVIL),
                scaling(2, 0.06, phases=phases, workload=EVIL, efficiency=figure(0.83)),
                scaling(2, 0.05, variant="ddp", workload=EVIL, efficiency=figure(0.9)),
            ],
        ),
        document("comm", [comm("broadcast", 2, 1024 * 4**power, 1e-4) for power in range(3)]),
        document("memory", [memory("weights", 1 << 20), leak(0.0, -5.0, 5.0, False)]),
    ]
    folder = tmp_path / "results"
    folder.mkdir()
    for made in documents:
        made.write(folder / f"{made.kind}.json")
    return folder


def report(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", "report", *map(str, words)])


@pytest.mark.requirement("003-T5-12")
def test_a_page_tables_and_a_picture(results: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "out.html", tmp_path / "out.png"
    done = report(results, "--report", page, "--picture", picture, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [target["state"] for target in found["targets"]].count("pass") == 3
    assert found["machines"][0]["rows"] == {"scaling": 3, "comm": 3, "memory": 2}
    text = page.read_text(encoding="utf-8")
    assert EVIL not in text
    for words in ("Targets", "Scaling efficiency", "Where the time", "All of memory"):
        assert words in text
    assert text.index("Targets") < text.index("Scaling efficiency") < text.index("All of scaling")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.requirement("003-T5-12")
def test_one_csv_has_all_rows(results: Path, tmp_path: Path) -> None:
    done = report(results, "--csv", tmp_path / "all.csv")
    assert done.exit_code == 0, done.stderr
    assert "targets pass" in done.stdout
    with (tmp_path / "all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert {row["kind"] for row in rows} == {"scaling", "comm", "memory"}
    scaled = [row for row in rows if row["kind"] == "scaling"]
    assert [row["world"] for row in scaled] == ["1", "2", "2"]
    assert float(scaled[1]["efficiency.median"]) == pytest.approx(0.1 / (2 * 0.06))
    assert len(scaled[0]["seconds"].split()) == 5


@pytest.mark.parametrize(("option", "name"), [("--report", "a.html"), ("--csv", "a.csv"), ("--picture", "a.png")])
def test_other_files_are_kept_unless_forced(option: str, name: str, results: Path, tmp_path: Path) -> None:
    theirs = tmp_path / name
    theirs.write_text("theirs")
    done = report(results, option, theirs)
    assert done.exit_code == 2
    assert "exists already" in done.stderr
    assert theirs.read_text() == "theirs"
    assert report(results, option, theirs, "--force").exit_code == 0
    assert theirs.read_bytes() != b"theirs"


def test_a_kind_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    document("dance", [{"world": 1}]).write(tmp_path / "a.json")
    done = report(tmp_path / "a.json")
    assert done.exit_code == 2
    assert "kind 'dance' is not known here" in done.stderr


def test_curves_have_the_ideal_the_target_and_bands() -> None:
    rows = [scaling(1, 1.0), scaling(2, 0.6)]
    (panel,) = efficiency_panels([("", row) for row in machine("scaling", rows).rows("scaling")])
    ours, ideal, target = panel.lines
    assert list(ours.y) == pytest.approx([100.0, 100 / 1.2])
    low, high = 99 / (2 * 0.606), 101 / (2 * 0.594)  # each time is known to 1 %
    assert (ours.low, ours.high) == (pytest.approx([100.0, low]), pytest.approx([100.0, high]))
    assert (set(ideal.y), set(target.y)) == ({100.0}, {80.0})


def test_phases_are_stacked() -> None:
    phases = {"data": figure(0.01), "compute": figure(0.02), "wait": figure(0.005)}
    (panel,) = phase_panels([("", scaling(1, 0.04, phases=phases))])
    found = {line.name: (line.base, line.y) for line in panel.lines}
    assert found == {"data": ([0.0], [10.0]), "compute": ([10.0], [30.0]), "wait": ([30.0], [35.0])}
