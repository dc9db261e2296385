"""Maps of points in a real browser: drawn, pointed at, colored, zoomed; names are text and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samestep.models.embeddings.report import png
from samestep.report.chart import Line, Panel, chart
from samestep.report.page import write_page
from samestep.report.scatter import RIGHT, WRONG, Map, Points, color_of, scatter
from tests.browser.browser import answer_of, browser

pytestmark = pytest.mark.browser

EVIL = "</script><img src=x onerror=document.title='taken'>"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    browser()
    points = Points(
        groups=[0, 0, 1, 1, -1],
        names=["cats & dogs", EVIL],
        texts=[["a.png"], ["b.png", "nearest: c"], [EVIL], ["d.png"], ["e.png"]],
        wrong=[False, True, False, False, False],
        pictures=[png(bytes([40 * n] * 12), 4, 3) for n in range(4)] + [b""],
    )
    maps = [
        Map(name="PCA", x=[0, 1, 2, 3, 4], y=[0, 0, 1, 1, 4], note="first note"),
        Map(name="t-SNE", x=[4, 3, 2, 1, 0], y=[0, 0, 1, 1, 4], note="second note"),
    ]
    path = tmp_path / "page.html"
    write_page(path, "points", f"<h1>points</h1>{scatter(points, maps)}")
    return path


_TOOLS = """
const svg = document.querySelector(".scatter svg"), box = document.querySelector(".scatter .values");
const dots = () => [...svg.querySelectorAll("g:first-child circle")];
const shown = () => dots().filter((dot) => dot.style.display !== "none");
const button = (text) => [...document.querySelectorAll(".scatter button")].find((b) => b.textContent.startsWith(text));
const at = (x, y, kind) => { const f = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent(kind, { clientX: f.left + x, clientY: f.top + y, bubbles: true })); };
const over = (dot) => at(Number(dot.getAttribute("cx")), Number(dot.getAttribute("cy")), "pointermove");
const places = () => dots().map((dot) => dot.getAttribute("cx"));
"""


def test_points_are_drawn_and_shown_with_picture_and_texts(page: Path, tmp_path: Path) -> None:
    seen = answer_of(
        page,
        _TOOLS
        + """
        const colors = dots().map((dot) => dot.getAttribute("fill"));
        over(dots().find((dot) => dot.getAttribute("class") === "wrong"));
        const picture = box.querySelector("img");
        await picture.decode();
        const first = { text: [...box.children].map((c) => c.textContent), size: [picture.naturalWidth, picture.naturalHeight], hidden: box.hidden };
        at(2, 2, "pointermove");
        return { colors, first, gone: box.hidden, legend: document.querySelector(".scatter .legend").textContent,
                 note: document.querySelector(".scatter .note").textContent };
        """,
        tmp_path,
    )
    # The error lies above the others, so it comes last.
    assert seen["colors"] == [color_of(0), color_of(1), color_of(1), "#8793a0", color_of(0)]
    assert seen["first"] == {"text": ["", "cats & dogs", "b.png", "nearest: c"], "size": [4, 3], "hidden": False}
    assert seen["gone"] is True
    assert seen["legend"] == f"no class (1)cats & dogs (2){EVIL} (2)ringed: an error"
    assert seen["note"] == "first note"


def test_maps_colors_classes_and_zoom_are_chosen(page: Path, tmp_path: Path) -> None:
    seen = answer_of(
        page,
        _TOOLS
        + """
        const before = places();
        button("t-SNE").click();
        const mirrored = places(), note = document.querySelector(".scatter .note").textContent;
        button("PCA").click();
        at(5, 5, "pointerdown"); at(500, 300, "pointermove"); at(500, 300, "pointerup");
        const zoomed = places();
        svg.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
        const back = places();
        button("cats").click();
        const left = shown().length;
        button("error").click();
        const verdicts = shown().map((dot) => dot.getAttribute("fill"));
        button("right").click();
        return { before, mirrored, note, zoomed, back, left, verdicts, wrong: shown().length };
        """,
        tmp_path,
    )
    assert seen["mirrored"] != seen["before"]
    assert seen["note"] == "second note"
    assert seen["zoomed"] != seen["before"]
    assert seen["back"] == seen["before"]
    assert seen["left"] == 3
    assert seen["verdicts"] == [RIGHT] * 4 + [WRONG]
    assert seen["wrong"] == 1


def test_names_are_text_and_nothing_is_loaded(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'<;]+", text)) == {"http://www.w3.org/2000/svg"}
    seen = answer_of(
        page,
        _TOOLS
        + """
        dots().forEach(over);
        const outside = new Image();
        const blocked = await new Promise((done) => {
          document.addEventListener("securitypolicyviolation", () => done(true));
          outside.onload = () => done(false);
          outside.src = "http://127.0.0.1:9/a.png";
        });
        return { title: document.title, images: document.querySelectorAll("img[src=x]").length, blocked };
        """,
        tmp_path,
    )
    assert seen == {"title": "points", "images": 0, "blocked": True}


def test_several_figures_on_one_page_are_drawn_once_each(tmp_path: Path) -> None:
    browser()
    points = Points(groups=[0, 0], names=["a"], texts=[[], []])
    figures = [scatter(points, [Map(name="PCA", x=[0, 1], y=[0, 1])]) for _ in range(2)]
    line = Line(name="mine", group="mine", x=[1, 2], y=[1, 2], color="#000000")
    figures += [chart([Panel(title="a", lines=[line])]) for _ in range(2)]
    write_page(tmp_path / "page.html", "figures", "".join(figures))
    seen = answer_of(
        tmp_path / "page.html",
        """
        const ids = [...document.querySelectorAll("clipPath")].map((one) => one.id);
        return { circles: document.querySelectorAll(".scatter circle").length, ids: new Set(ids).size,
                 legends: document.querySelectorAll(".legend").length };
        """,
        tmp_path,
    )
    assert seen == {"circles": 4, "ids": 2, "legends": 4}
