"""`samestep plot RUN --embeddings` as a person types it, alone and under torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.processes import samestep, torchrun
from tests.predicting import finished_run


def without_origin(page: Path) -> str:
    """A page without the date and the command that made it."""
    return re.sub(r"<td>(?:page written|command)</td><td>[^<]*", "", page.read_text(encoding="utf-8"))


@pytest.mark.requirement("000-P1-10")
def test_the_page_is_the_same_alone_and_on_two_ranks(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", "Pictured")
    alone = samestep("plot", "run", "--embeddings", "--maps", "pca,tsne", "--json", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout) == {
        "page": "run/embeddings.html", "points": 12, "samples": 12, "maps": ["PCA", "t-SNE"],
        "missing": [], "errors": 1, "view": "embedding", "step": 3, "weights": "raw",
    }  # fmt: skip
    two = torchrun("plot", "run", "--embeddings", "--maps", "pca,tsne", "--report", "two.html", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    assert two.stdout == "12 points, 1 of them errors, on PCA, t-SNE: two.html\n"
    assert without_origin(tmp_path / "run" / "embeddings.html") == without_origin(tmp_path / "two.html")


def test_what_cannot_be_done_is_refused_before_the_work(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", "Pictured")
    (tmp_path / "mine.html").write_text("a page of somebody else's")
    for words, message in (
        (("--maps", "som"), "--maps names 'som': give some of pca,tsne,umap"),
        (("--report", "mine.html"), "mine.html exists already, and is no page of samestep"),
        (("other",), "--embeddings draws one run"),
        (("--which", "9"), "--which is '9'"),
        (("--weights", "ema"), "holds no ema weights"),
    ):
        done = samestep("plot", "run", "--embeddings", *words, cwd=tmp_path)
        assert done.returncode == 2, done.stdout
        assert message in done.stderr
    assert not (tmp_path / "run" / "embeddings.html").exists()
