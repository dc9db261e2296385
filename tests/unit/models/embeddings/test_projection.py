"""Maps of embeddings: what each keeps, that it is always the same, and what there is none of."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from samestep.errors import LaunchError, TaskError
from samestep.models.embeddings.projection import chosen_maps, project


def clusters(samples: int = 30) -> np.ndarray:
    draw = np.random.default_rng(0)
    middles = 10 * np.eye(3, 6)
    return (middles[np.arange(samples) % 3] + draw.normal(size=(samples, 6))).astype(np.float32)


def test_pca_keeps_what_lies_in_a_plane() -> None:
    draw = np.random.default_rng(1)
    plane = draw.normal(size=(20, 2)) * [3, 1]
    turned = plane @ np.linalg.qr(draw.normal(size=(5, 5)))[0][:2]
    (made,), missing = project(turned, ["pca"])
    placed = np.stack([made.x, made.y], 1)
    away = np.linalg.norm(placed[:, None] - placed, axis=2)
    expected = np.linalg.norm(plane[:, None] - plane, axis=2)
    np.testing.assert_allclose(away, expected, atol=1e-5)
    assert "they hold 100% of the variance" in made.note
    assert not missing


def test_embeddings_of_one_number_and_equal_ones_have_a_map() -> None:
    (line,), _ = project(np.arange(4.0).reshape(4, 1), ["pca"])
    assert line.y == [0.0] * 4
    (point,), _ = project(np.ones((4, 3)), ["pca"])
    assert set(point.x) == {0.0}


def test_tsne_is_the_same_each_time_and_keeps_classes_together() -> None:
    rows = clusters()
    (one,), _ = project(rows, ["tsne"])
    (two,), _ = project(rows, ["tsne"])
    assert (one.x, one.y) == (two.x, two.y)
    placed = np.stack([one.x, one.y], 1)
    away = np.linalg.norm(placed[:, None] - placed, axis=2)
    np.fill_diagonal(away, np.inf)
    assert (away.argmin(1) % 3 == np.arange(30) % 3).all()


def test_what_is_not_installed_is_left_out_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    monkeypatch.setitem(sys.modules, "umap", None)
    made, missing = project(clusters(), ["pca", "tsne", "umap"])
    assert [one.name for one in made] == ["PCA"]
    assert missing == [
        "no t-SNE: scikit-learn is not installed (pip install scikit-learn)",
        "no UMAP: it is not installed (pip install umap-learn)",
    ]
    with pytest.raises(LaunchError, match="no map can be drawn: no t-SNE"):
        project(clusters(), ["tsne"])


def test_few_points_have_no_neighbourhoods() -> None:
    made, missing = project(clusters(4), ["pca", "tsne"])
    assert [one.name for one in made] == ["PCA"]
    assert missing == ["no t-SNE: 4 points are too few"]
    with pytest.raises(TaskError, match="there are 1 embeddings"):
        project(clusters(1), ["pca"])


def test_umap_is_the_same_each_time() -> None:
    pytest.importorskip("umap", reason="umap-learn is not installed")
    (one,), _ = project(clusters(), ["umap"])
    (two,), _ = project(clusters(), ["umap"])
    assert (one.name, one.x) == ("UMAP", two.x)


def test_names_of_maps_are_checked() -> None:
    assert chosen_maps("tsne, pca,tsne") == ["tsne", "pca"]
    for text in ("pca,som", "", " , "):
        with pytest.raises(LaunchError, match="give some of pca,tsne,umap"):
            chosen_maps(text)
