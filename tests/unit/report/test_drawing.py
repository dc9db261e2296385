"""Curves as a picture and as a page."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep.errors import MissingExtraError, OutputError
from samestep.report.curves.history import History, read_histories
from samestep.report.curves.page import write_html
from samestep.report.curves.panels import choose, panels_of
from samestep.report.picture import write_panels
from tests.unit.report.runs import history, write_run
from tests.unit.sweep.studies import data_of

BAD = "<script>alert(1)</script>"


def drawn(runs: list[History]) -> list[Any]:
    return panels_of(runs, choose(runs, []))


def page_of(runs: list[History], path: Path) -> str:
    write_html(runs, choose(runs, []), drawn(runs), path)
    return path.read_text(encoding="utf-8")


def test_a_run_has_one_color_and_the_curves_of_a_list_one_panel() -> None:
    rates = {"lr[0]": [0.1], "lr[1]": [0.2]}
    runs = [history(loss=[1.0], **rates), history("other", loss=[2.0], **rates)]
    loss, rate = drawn(runs)
    assert (loss.title, rate.title) == ("loss", "learning rate")
    assert [curve.name for curve in rate.lines] == ["mine [0]", "mine [1]", "other [0]", "other [1]"]
    assert [curve.dash for curve in rate.lines] == ["", "dash", "", "dash"]
    assert {c.group: c.color for c in loss.lines} == {c.group: c.color for c in rate.lines}
    assert len({curve.color for curve in loss.lines}) == 2


def test_skipped_steps_are_marked_at_the_loss() -> None:
    run = replace(history(loss=[1.0, math.nan], f1=[1.0, 1.0]), skipped=[1])
    loss, f1 = drawn([run])
    assert [flag["text"] for flag in loss.lines[0].flags] == ["step 1: NaN or infinite, skipped"]
    assert not f1.lines[0].flags


@pytest.mark.parametrize(("name", "begins"), [("c.png", b"\x89PNG"), ("c.svg", b"<?xml"), ("c.PDF", b"%PDF")])
def test_a_picture_is_what_its_name_says(tmp_path: Path, name: str, begins: bytes) -> None:
    odd = replace(history("_$\\frac{$", loss=[1.0, math.nan, 2.0], **{"$x^": [1.0]}), skipped=[1])
    long = history("long", loss=[float(step) for step in range(2000)], loss_scale=[2.0])
    path = tmp_path / "new" / name
    write_panels("mine", drawn([odd, long]), path)
    assert path.read_bytes().startswith(begins)
    assert [file.name for file in path.parent.iterdir()] == [name], "nothing else is left there"


def test_a_picture_replaces_nothing_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "c.png"
    path.write_text("theirs")
    with pytest.raises(OutputError, match="--force replaces it"):
        write_panels("mine", drawn([history(loss=[1.0])]), path)
    assert path.read_text() == "theirs"
    write_panels("mine", drawn([history(loss=[1.0])]), path, force=True)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OutputError, match=r"end its name in \.png, \.svg, \.pdf; for a page, --report"):
        write_panels("mine", drawn([history(loss=[1.0])]), tmp_path / "c.html")


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_panels("mine", drawn([history(loss=[1.0])]), tmp_path / "file" / "c.png")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"\.\[plots\]"):
        write_panels("mine", drawn([history(loss=[1.0])]), tmp_path / "c.png")


def test_the_page_holds_every_curve_and_loads_nothing(tmp_path: Path) -> None:
    runs = [history(loss=[2.0, math.nan, 1.0]), history("other", loss=[3.0])]
    page = page_of(runs, tmp_path / "c.html")
    (loss,) = data_of(page)
    assert [line["group"] for line in loss["lines"]] == ["mine", "other"]
    assert loss["lines"][0]["y"] == [2.0, None, 1.0]
    assert [flag["x"] for flag in loss["lines"][0]["flags"]] == [1]
    assert not re.search(r"(src|href)=|@import|url\((?!#)", page)
    assert len(page) < 40_000


def test_the_page_says_what_the_runs_were_made_with(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", [{"step": 0, "loss": 1.0}])
    (run / "config.json").write_text("{}")
    (run / "plan.json").write_text('{"device": "cpu", "threads_per_rank": 3}')
    page = page_of(read_histories([run]), tmp_path / "c.html")
    empty = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    for text in (str(run), f"sha256 {empty}", "threads per rank</td><td>3", "page written", "samestep 0"):
        assert text in page


def test_every_value_of_the_page_is_escaped(tmp_path: Path) -> None:
    page = page_of([history(BAD, loss=[1.0], **{BAD: [2.0]})], tmp_path / "c.html")
    assert page.count("alert(1)") > 5
    assert "<script>alert" not in page
    assert data_of(page)[0]["lines"][0]["name"] == BAD


def test_thousands_of_steps_make_a_small_page(tmp_path: Path) -> None:
    values = [math.sin(step) for step in range(100_000)]
    assert len(page_of([history(loss=values)], tmp_path / "c.html")) < 80_000
