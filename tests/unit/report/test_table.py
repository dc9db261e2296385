"""Tables of HTML pages."""

from __future__ import annotations

from samestep.report.table import code, html_table, marked


def test_texts_are_escaped_and_numbers_aligned() -> None:
    made = html_table(("name", "count", "share"), [("<b>", 1200, 0.25), (code("<i>"), 3, 1.0)])
    assert "<td>&lt;b&gt;</td>" in made
    assert "<td><code>&lt;i&gt;</code></td>" in made
    assert '<td class="number">1,200</td><td class="number">0.25</td>' in made
    assert '<th>name</th><th class="number">count</th>' in made


def test_texts_that_are_numbers_and_cells_of_their_own_class() -> None:
    made = html_table(("loss", "state"), [("0.5", marked("a & b", "kept"))], numbers=("loss",), kind="facts")
    assert made.startswith('<table class="facts"><thead><tr><th class="number">loss</th><th>state</th></tr></thead>')
    assert '<td class="number">0.5</td><td class="kept">a &amp; b</td>' in made


def test_a_table_without_a_header_and_one_without_rows() -> None:
    assert html_table((), [("a", True)]) == "<table><tbody><tr><td>a</td><td>True</td></tr></tbody></table>"
    assert html_table(("a",), []) == "<table><thead><tr><th>a</th></tr></thead><tbody></tbody></table>"
