"""Pages and their charts."""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import samestep
from samestep.errors import OutputError
from samestep.ui.chart import Line, Panel, chart
from samestep.ui.page import page, write_page


def test_a_page_says_with_what_it_was_written() -> None:
    text = page("mine", "<p>x</p>", {"device": "<cpu>"})
    assert "<td>device</td><td>&lt;cpu&gt;</td>" in text
    assert f"samestep {samestep.__version__}, torch " in text
    assert f"Python {platform.python_version()}" in text
    assert re.search(r"page written</td><td>20\d\d-\d\d-\d\d ", text)


def test_the_version_of_torch_needs_no_torch() -> None:
    code = "import sys, samestep.ui.page as p; p.page('a', 'b'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    found = re.search(r'<script type="application/json">(.*?)</script>', text)
    assert found is not None
    (panel,) = json.loads(found[1])
    assert panel["lines"][0]["name"] == "</script>&"
    assert (panel["lines"][0]["x"], panel["lines"][0]["y"]) == ([0, 1], [1.0, None])
    assert panel["yrange"] == [0.0, None]


def test_the_chart_makes_no_html_of_names() -> None:
    code = files("samestep.ui").joinpath("chart.js").read_text(encoding="utf-8")
    assert "textContent" in code
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in code


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here to parse JavaScript")
def test_the_chart_is_valid_javascript(tmp_path: Path) -> None:
    code = files("samestep.ui").joinpath("chart.js").read_text(encoding="utf-8")
    (tmp_path / "chart.js").write_text(code, encoding="utf-8")
    done = subprocess.run(
        ["node", "--check", "chart.js"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
