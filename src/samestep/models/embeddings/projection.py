"""Projects embeddings to two numbers: PCA by numpy, t-SNE by scikit-learn, UMAP if it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from samestep.errors import LaunchError, TaskError
from samestep.report.scatter import Map

Rows = np.ndarray[Any, Any]
_FEWEST = 5
"""Points below which neighbourhoods say nothing."""
_SEED = 0


def chosen_maps(text: str) -> list[str]:
    """Return the maps that a text such as `pca,tsne` names, each once.

    Raises:
        LaunchError: if it names another one, or none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in MAPS]
    if unknown or not names:
        raise LaunchError(f"--maps names {', '.join(map(repr, unknown)) or 'nothing'}: give some of {','.join(MAPS)}")
    return list(dict.fromkeys(names))


def project(rows: Rows, names: Sequence[str]) -> tuple[list[Map], list[str]]:
    """Maps of the points, and what there is no map of, and why.

    Raises:
        TaskError: if there are fewer than two points.
        LaunchError: if no map can be drawn.
    """
    if len(rows) < 2:
        raise TaskError(f"there are {len(rows)} embeddings: a map needs two at least")
    made, missing = [], []
    for name in names:
        try:
            made.append(MAPS[name](rows))
        except _NoMap as why:
            missing.append(str(why))
    if not made:
        raise LaunchError(f"no map can be drawn: {'; '.join(missing)}")
    return made, missing


class _NoMap(Exception):
    """Raised if a map cannot be made; holds the reason."""


def _pca(rows: Rows) -> Map:
    centered = rows.astype(np.float64) - rows.mean(0, dtype=np.float64)
    left, spread, right = np.linalg.svd(centered, full_matrices=False)
    # A direction's sign is arbitrary: its largest part is positive, whatever the library computed.
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(1)])
    placed = (left * spread * signs)[:, :2]
    if placed.shape[1] < 2:  # embeddings of one number
        placed = np.pad(placed, ((0, 0), (0, 1)))
    total = float((spread**2).sum())
    share = float((spread[:2] ** 2).sum()) / total if total else 1.0
    note = (
        f"PCA: the two directions in which the embeddings differ most; they hold {share:.0%} of the "
        "variance, and what differs elsewhere lies on top of each other."
    )
    return Map(name="PCA", x=placed[:, 0].tolist(), y=placed[:, 1].tolist(), note=note)


def _tsne(rows: Rows) -> Map:
    _refuse_few(rows, "t-SNE")
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise _NoMap("no t-SNE: scikit-learn is not installed (pip install scikit-learn)") from None
    chosen = min(30.0, max(2.0, (len(rows) - 1) / 3))
    placed = TSNE(2, perplexity=chosen, init="pca", random_state=_SEED).fit_transform(rows)
    note = (
        f"t-SNE (perplexity {chosen:g}): neighbours stay together; how far groups lie apart, and how "
        "large they are, says little."
    )
    return Map(name="t-SNE", x=placed[:, 0].tolist(), y=placed[:, 1].tolist(), note=note)


def _umap(rows: Rows) -> Map:
    _refuse_few(rows, "UMAP")
    try:
        from umap import UMAP
    except ImportError:
        raise _NoMap("no UMAP: it is not installed (pip install umap-learn)") from None
    neighbours = min(15, len(rows) - 1)
    placed = UMAP(n_neighbors=neighbours, random_state=_SEED, n_jobs=1).fit_transform(rows)
    note = f"UMAP ({neighbours} neighbours): neighbours stay together; how far groups lie apart says little."
    return Map(name="UMAP", x=placed[:, 0].tolist(), y=placed[:, 1].tolist(), note=note)


def _refuse_few(rows: Rows, name: str) -> None:
    if len(rows) < _FEWEST:
        raise _NoMap(f"no {name}: {len(rows)} points are too few")


MAPS: dict[str, Callable[[Rows], Map]] = {"pca": _pca, "tsne": _tsne, "umap": _umap}
