"""What a page is drawn from: every sample's embedding, its class, and its nearest reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.distributed.context import SingleProcessContext
from samestep.errors import TaskError
from samestep.models.embeddings.embedded import EmbeddedRun, EmbeddingRequest, embed_run
from samestep.models.embeddings.report import figure, picture_of, write_html
from tests.predicting import finished_run


@pytest.fixture(autouse=True)
def _path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a task file puts its folder on the path."""
    monkeypatch.syspath_prepend(".")


def embedded(run: Path, **request: object) -> EmbeddedRun:
    found = embed_run(EmbeddingRequest(run, **request), SingleProcessContext(threads=1))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return finished_run(tmp_path / "run", "Pictured")


def test_an_error_is_a_sample_next_to_another_class(run: Path) -> None:
    found = embedded(run)
    assert found.drawn.labels == [0, 1, 2] * 4
    assert found.wrong == [n == 4 for n in range(12)]
    picture = picture_of(found, ("pca",))
    assert picture.errors == 1
    assert picture.points.names == ["top", "<b>middle</b>", "bottom"]
    assert picture.points.texts[4][0] == "4.png"
    assert picture.points.texts[4][1].startswith("nearest: bottom, ")
    assert picture.points.pictures is not None


def test_names_on_the_page_are_text(run: Path, tmp_path: Path) -> None:
    found = embedded(run)
    write_html(found, picture_of(found, ("pca",)), run, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>middle" not in text
    assert "&lt;b&gt;middle&lt;/b&gt;" in text
    assert "1 of 12, so precision@1 is 0.9167" in text


def test_a_sample_is_not_its_own_neighbour(run: Path) -> None:
    found = embedded(run, reference="valid")
    assert found.nearest is not None
    assert all(near.place != at for at, near in enumerate(found.nearest))


def test_points_are_spread_over_a_large_set(run: Path) -> None:
    found = embedded(run, points=5)
    assert found.drawn.indices == [0, 2, 4, 7, 9]
    assert found.wrong == [False, False, True, False, False]
    assert "5 of 12 samples, evenly spread" in figure(found, picture_of(found, ("pca",)))


def test_data_without_classes_has_no_errors(run: Path) -> None:
    found = embedded(run, data="7")
    assert (found.drawn.labels, found.wrong) == (None, None)
    said = figure(found, picture_of(found, ("pca",)))
    assert "They have no classes" in said


def test_distances_are_the_configs(run: Path) -> None:
    overrides = (
        "evaluation.mode=retrieval", "evaluation.distance=euclidean", "best.metric=precision_at_1",
        "best.mode=max",
    )  # fmt: skip
    found = embedded(run, overrides=overrides)
    assert found.distance == "euclidean"
    assert float(found.drawn.rows[0].norm()) == pytest.approx(2**0.5)
    assert found.wrong == [n == 4 for n in range(12)]


def test_a_task_without_embeddings_and_an_unknown_view_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="Scores has no embeddings: define eval_embed"):
        embedded(finished_run(tmp_path / "other", "Scores"))
    with pytest.raises(TaskError, match="there is no view head"):
        embedded(run, view="head")
