"""Pages and their charts."""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

import samestep
from samestep.errors import OutputError
from samestep.report.chart import Line, Panel, chart
from samestep.report.page import page, write_page
from tests.unit.sweep.studies import data_of


def test_a_page_says_with_what_it_was_written() -> None:
    text = page("mine", "<p>x</p>", {"device": "<cpu>"})
    assert "<td>device</td><td>&lt;cpu&gt;</td>" in text
    assert f"samestep {samestep.__version__}, torch " in text
    assert f"Python {platform.python_version()}" in text
    assert re.search(r"page written</td><td>20\d\d-\d\d-\d\d ", text)


def test_only_force_replaces_what_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "mine.html"
    path.write_text("theirs")
    with pytest.raises(OutputError, match="is no page of samestep"):
        write_page(path, "mine", "")
    write_page(path, "mine", "", force=True)
    write_page(path, "again", "")
    assert "<title>again" in path.read_text(encoding="utf-8")


def test_a_chart_is_strict_json_whatever_its_values_and_names() -> None:
    line = Line(name="</script>&", x=range(2), y=(1.0, math.nan), color="#000000")
    text = chart([Panel(title="a", lines=[line], yrange=(0.0, math.inf))])
    (panel,) = data_of(text)
    assert panel["lines"][0]["name"] == "</script>&"
    assert (panel["lines"][0]["x"], panel["lines"][0]["y"]) == ([0, 1], [1.0, None])
    assert panel["yrange"] == [0.0, None]


def test_the_chart_makes_no_html_of_names() -> None:
    code = files("samestep.report").joinpath("chart.js").read_text(encoding="utf-8")
    assert "textContent" in code
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in code


DOCUMENT = """
class Node {
  constructor(name) { Object.assign(this, { name, set: {}, inside: [], style: {}, heard: {}, clientWidth: 600, textContent: "" }); }
  setAttribute(key, value) { this.set[key] = String(value); }
  append(one) { this.inside.push(one); }
  appendChild(one) { this.inside.push(one); return one; }
  replaceChildren() { this.inside = []; }
  addEventListener(kind, call) { this.heard[kind] = call; }
  getBoundingClientRect() { return { left: 0, top: 0 }; }
  querySelector() { return { textContent: process.argv[2] }; }
  all() { return [this, ...this.inside.flatMap((one) => one.all())]; }
}
const figure = new Node("figure");
globalThis.window = figure;
globalThis.document = { createElementNS: (_, name) => new Node(name), querySelectorAll: () => [figure] };
require(process.argv[1]);
const act = (name, kind, event) => figure.all().filter((one) => one.name === name).forEach((one) => one.heard[kind] && one.heard[kind](event));
act("svg", "pointermove", { clientX: 300, clientY: 100 });
const drawing = () => figure.all().map((one) => [one.name, one.set]);
const first = drawing();
const shown = figure.all().filter((one) => one.name === "span").map((one) => one.textContent);
const words = figure.all().map((one) => one.textContent);
act("button", "click");
act("svg", "pointerdown", { clientX: 100, clientY: 100 });
act("svg", "pointermove", { clientX: 300, clientY: 100 });
act("svg", "pointerup", { clientX: 300, clientY: 100 });
act("button", "click");
console.log(JSON.stringify({ shown, words, first, zoomed: drawing() }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to run JavaScript")
def test_the_chart_draws_points_with_coordinates_whatever_the_values(tmp_path: Path) -> None:
    curves: list[list[float]] = [
        [1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [0.0, 0.0, 0.0], [math.nan] * 3, [], [7.0],
        [-1.0, 0.0, 1e300], [1e-300, math.inf, 1.0],
    ]  # fmt: skip
    panels = [
        Panel(
            title="a",
            lines=[
                Line(
                    name="mine", group="mine", x=range(len(curve)), y=curve, color="#000000", low=curve,
                    high=curve, mark="star", flags=[{"x": 1, "text": "odd"}],
                )
            ],
            xlog=xlog, ylog=ylog, zero=zero,
        )
        for curve in curves
        for xlog, ylog, zero in ((False, False, True), (False, True, False), (True, False, False))
    ]  # fmt: skip
    panels += [
        Panel(
            title="b", alone=True, nearest=True, full=True, xticks=[0, 1],
            xlabels=["none", "one"], yticks=[0.0], ylabels=["a label"],
            xrange=(-1.0, 1.2), yrange=(0.0, 1.0), notes=[{"x": 0, "y": 1, "text": "a note"}],
            lines=[Line(name="near", x=range(len(curve)), y=curve, color="#000000", text=["first\nsecond"] * 2)],
        )
        for curve in ([0.65, 0.1], [], [math.nan, 0.65])
    ]  # fmt: skip
    panels += [
        Panel(
            title="c", alone=True, xticks=[0.5, 1], xlabels=["left", "right"], xrange=(-0.5, 1.5), zero=True, ylog=ylog,
            lines=[Line(name="stacked", x=[0.5, 1], y=[5, 7], base=[2, 3], bar=0.5, color="#abcdef", low=[4, 6], high=[6, math.inf])],
        )
        for ylog in (False, True)
    ]  # fmt: skip
    found = re.search(r'<script type="application/json">(.*?)</script>', chart(panels))
    assert found is not None
    code = tmp_path / "chart.js"
    code.write_bytes(files("samestep.report").joinpath("chart.js").read_bytes())
    done = subprocess.run(["node", "-e", DOCUMENT, str(code), found[1]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert "mine: 2" in result["shown"], "the value under the pointer"
    assert [s for s in result["shown"] if s.startswith("stacked: 3")], "of a bar, its own height"
    assert result["words"].count("left") == 4, "below both panels, and beside both pointers"
    bars = [found for name, found in result["first"] if found.get("fill") == "#abcdef"]
    assert len(bars) == 4, "two in each panel"
    assert all(float(bar["height"]) > 0 and float(bar["width"]) > 0 for bar in bars)
    assert result["words"].count("second") == 1, "of the nearest point only"
    assert {"one", "a label", "a note"} <= set(result["words"])
    for drawing in (result["first"], result["zoomed"]):
        assert not [entry for entry in drawing if re.search("NaN|Infinity|undefined", str(entry))]
        assert sum(name == "svg" for name, _ in drawing) == len(panels)
