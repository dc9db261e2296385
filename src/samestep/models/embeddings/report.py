"""The page: a map to look at, and a table of the classes and what they are taken for."""

from __future__ import annotations

import html
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.models.embeddings.embedded import EmbeddedRun, EmbeddedSet, as_array
from samestep.models.embeddings.projection import project
from samestep.report.page import write_page
from samestep.report.run_facts import run_facts
from samestep.report.scatter import Map, Points, scatter
from samestep.report.table import html_table

LARGEST = 64
"""Pixels of a picture's longer side."""


def pictures_of(dataset: Any, indices: Sequence[int]) -> list[bytes] | None:
    """Return a PNG file of each sample; None if they are no images.

    A sample is an image if it, or its first element, is a tensor or array (1 or 3, height, width) or
    (height, width), of which several views may be stacked. Values are scaled to those of all.
    """
    images = []
    for index in indices:
        image = _image(dataset[index])
        if image is None:
            return None
        images.append(_small(image))
    low = min(float(image.min()) for image in images)
    high = max(float(image.max()) for image in images)
    return [_file((image - low) / ((high - low) or 1)) for image in images]


def _image(sample: Any) -> Tensor | None:
    """(channels, height, width) of a sample's image, or of its first view; None if it has none."""
    if isinstance(sample, (tuple, list)) and sample:
        sample = sample[0]
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "biuf":
        sample = torch.from_numpy(sample)
    if not isinstance(sample, Tensor) or sample.is_complex():
        return None
    image = sample.detach().cpu().float()
    if image.dim() == 4:
        image = image[0]
    if image.dim() == 2:
        image = image.unsqueeze(0)
    is_image = image.dim() == 3 and image.shape[0] in (1, 3) and min(image.shape[1:]) > 1
    return torch.nan_to_num(image) if is_image else None


def _small(image: Tensor) -> Tensor:
    height, width = image.shape[1:]
    scale = LARGEST / max(height, width)
    if scale >= 1:
        return image
    size = max(1, round(height * scale)), max(1, round(width * scale))
    return F.interpolate(image.unsqueeze(0), size=size, mode="area")[0]


def _file(image: Tensor) -> bytes:
    if image.shape[0] == 3 and bool((image == image[:1]).all()):
        image = image[:1]  # gray, at a third of the bytes
    pixels = (image * 255).round().clamp(0, 255).to(torch.uint8)
    height, width = pixels.shape[1:]
    return png(pixels.permute(1, 2, 0).contiguous().numpy().tobytes(), width, height)


@dataclass(frozen=True)
class Picture:
    """The contents of the page, and what is missing."""

    points: Points
    maps: list[Map]
    missing: list[str]

    @property
    def errors(self) -> int | None:
        """Return how many points are wrong; None if that is not known."""
        return None if self.points.wrong is None else sum(self.points.wrong)


def picture_of(embedded: EmbeddedRun, maps: Sequence[str] = ("pca", "tsne", "umap")) -> Picture:
    """Return the maps of a run's embeddings."""
    drawn = embedded.drawn
    made, missing = project(as_array(drawn.rows), maps)
    points = Points(
        groups=drawn.labels or [-1] * len(drawn.rows),
        names=drawn.class_names() if drawn.labels else [],
        texts=[_texts(embedded, at) for at in range(len(drawn.rows))],
        wrong=embedded.wrong,
        pictures=pictures_of(drawn.dataset, drawn.indices),
    )
    return Picture(points, made, missing)


def _texts(embedded: EmbeddedRun, at: int) -> list[str]:
    lines = [embedded.drawn.name_of(at)]
    references, nearest = embedded.references, embedded.nearest
    if references is not None and nearest is not None:
        near, distance = nearest[at]
        lines.append(f"nearest: {_class_of(references, near)}{references.name_of(near)}")
        lines.append(f"{embedded.distance} distance {distance:.3g}")
    return lines


def _class_of(found: EmbeddedSet, at: int) -> str:
    return f"{found.class_names()[found.labels[at]]}, " if found.labels else ""


def write_html(embedded: EmbeddedRun, picture: Picture, run: Path, path: Path, force: bool = False) -> None:
    """Write the page.

    Args:
        force: whether a file that is no page of ours is replaced.

    Raises:
        OutputError: if the file is not ours to replace, or cannot be written.
    """
    title = f"{run.resolve().name}: embeddings"
    body = f"""<h1>{html.escape(title)}</h1>
{figure(embedded, picture)}"""
    facts = {
        "run": str(run),
        "weights": f"{embedded.weights}, step {embedded.step}",
        "view": embedded.drawn.view,
        **run_facts(run),
    }
    write_page(path, title, body, facts, force)


def figure(embedded: EmbeddedRun, picture: Picture) -> str:
    """Return the maps with what they show, and the table of classes, as HTML."""
    drawn, total = len(embedded.drawn.rows), embedded.samples
    some = f"{drawn} of {total} samples, evenly spread" if drawn < total else f"{drawn} samples"
    unit = ", of unit length" if embedded.distance == "cosine" else ""
    lines = [f"{some}; embeddings of {embedded.drawn.rows.shape[1]} numbers{unit}."]
    if picture.errors is not None and embedded.references is not None:
        lines.append(
            f"An error is a sample whose nearest of {len(embedded.references.rows)} reference samples is of "
            f"another class: {picture.errors} of {drawn}, so precision@1 is {1 - picture.errors / drawn:.4f}."
        )
    elif embedded.drawn.labels is None:
        lines.append("They have no classes, so nothing is known about errors.")
    lines += [f"There is {reason}." for reason in picture.missing]
    if picture.points.pictures is None:
        lines.append("They are no images, so none are shown.")
    text = " ".join(map(html.escape, lines))
    return f"<p>{text}</p>\n{scatter(picture.points, picture.maps)}\n{_classes(embedded)}"


def _classes(embedded: EmbeddedRun) -> str:
    """Return a row for each class: its samples, its errors, and what it is taken for most often."""
    labels, wrong = embedded.drawn.labels, embedded.wrong
    references, nearest = embedded.references, embedded.nearest
    if labels is None or wrong is None or references is None or nearest is None:
        return ""
    names, other_names = embedded.drawn.class_names(), references.class_names()
    assert references.labels is not None, "else nothing is known to be wrong"
    rows = []
    for label in sorted(set(labels)):
        places = [at for at, number in enumerate(labels) if number == label]
        taken = Counter(other_names[references.labels[nearest[at].place]] for at in places if wrong[at])
        errors = sum(taken.values())
        most = ", ".join(f"{name} ({count})" for name, count in taken.most_common(3))
        rows.append([names[label], str(len(places)), str(errors), f"{1 - errors / len(places):.3f}", most])
    columns = ["class", "samples", "errors", "precision@1", "taken for"]
    return html_table(columns, rows, numbers=columns[1:4])


_KINDS = {1: 0, 3: 2}
"""PNG's number for gray and for RGB, by how many bytes a pixel has."""


def png(pixels: bytes, width: int, height: int) -> bytes:
    """Return a PNG file of 8-bit gray or RGB pixels, row by row."""
    channels, rest = divmod(len(pixels), width * height)
    if rest or channels not in _KINDS:
        raise ValueError(f"{len(pixels)} bytes are no {width}x{height} pixels of 1 or 3 bytes")
    row = width * channels
    # Each row begins with its filter: none.
    rows = b"".join(b"\0" + pixels[start : start + row] for start in range(0, len(pixels), row))
    header = struct.pack(">IIBBBBB", width, height, 8, _KINDS[channels], 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
