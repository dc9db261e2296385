"""Folders of images, one folder for each class, as a dataset; and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from samestep.errors import TaskError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
Transform = Callable[[Image.Image], Tensor]


def list_classes(folder: Path) -> dict[str, list[Path]]:
    """Return the images of each class, both by name.

    Raises:
        TaskError: if there are no classes, one only, or one without images.
    """
    if not folder.is_dir():
        raise TaskError(f"there is no folder {folder}: give one that has a folder for each class")
    found = {inside.name: list_images(inside) for inside in sorted(folder.iterdir()) if inside.is_dir()}
    if not found:
        loose = len(list_images(folder))
        what = f"{loose} images without labels" if loose else "nothing"
        raise TaskError(f"{folder} holds {what}: each class must be a folder of images in it")
    empty = [name for name, images in found.items() if not images]
    if empty:
        raise TaskError(
            f"{folder} has folders without images: {_listed(empty)}. Images end in "
            f"{' '.join(SUFFIXES)}; remove the folders, or fill them"
        )
    if len(found) == 1:
        raise TaskError(f"{folder} has one class only, {next(iter(found))!r}: a contrast, and a classifier, need two")
    return found


def list_images(folder: Path) -> list[Path]:
    """Return the image files in a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in SUFFIXES)


def read_image(path: Path) -> Image.Image:
    """Return an image in RGB.

    Raises:
        TaskError: if it cannot be read.
    """
    try:
        with Image.open(path) as image:
            return _as_rgb(image)
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise TaskError(
            f"{path} cannot be read as an image: {error}. Remove it, or leave such files out: "
            "--skip-unreadable of split.py, params.unreadable=skip of a run"
        ) from None


_DEEP = ("I", "I;16", "I;16B", "I;16L", "F")
"""Modes of Pillow with more than 8 bits per pixel, of which `convert` would keep the lowest ones only."""


def _as_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB; 16 bits are scaled to 8, and so are floats from 0 to 1.

    Raises:
        ValueError: if its numbers are of another range.
    """
    if image.mode not in _DEEP:
        return image.convert("RGB")
    pixels = np.asarray(image).astype(np.float64)
    largest = 1.0 if image.mode == "F" else 65535.0
    if pixels.min() < 0 or pixels.max() > largest:
        raise ValueError(
            f"its pixels are from {pixels.min():g} to {pixels.max():g}, and those of mode {image.mode} must be "
            f"from 0 to {largest:g}"
        )
    return Image.fromarray(np.rint(pixels * (255 / largest)).astype(np.uint8)).convert("RGB")


def unreadable(paths: Sequence[Path]) -> dict[Path, str]:
    """Those of the images that cannot be read, and why. It decodes all of them."""
    wrong = {}
    for path in paths:
        try:
            read_image(path)
        except TaskError as error:
            wrong[path] = str(error)
    return wrong


class Images(Dataset[tuple[Tensor, int]]):
    """Images and the numbers of their classes.

    With `views` above 1 a sample is a stack of so many views of an image, each drawn by itself.
    `classes` and `samples` are named as in torchvision's ImageFolder.
    """

    def __init__(
        self, samples: Sequence[tuple[Path, int]], classes: Sequence[str], transform: Transform, views: int = 1
    ) -> None:
        self.samples, self.classes = list(samples), list(classes)
        self._transform, self._views = transform, views

    @classmethod
    def labelled(
        cls,
        folder: Path,
        transform: Transform,
        views: int = 1,
        classes: Sequence[str] | None = None,
        skip_unreadable: bool = False,
    ) -> Images:
        """Return the images of class folders.

        Args:
            folder: what holds a folder for each class.
            transform: makes a tensor of an image.
            views: how many a sample has.
            classes: those that are known; the folder's own if None.
            skip_unreadable: leave out images that cannot be read; else reading one is an error.
        """
        found = list_classes(folder)
        names = list(found) if classes is None else list(classes)
        unknown = sorted(found.keys() - set(names))
        if unknown:
            raise TaskError(f"{folder} has classes that the training set has not: {_listed(unknown)}")
        samples = [(path, names.index(name)) for name in found for path in found[name]]
        if skip_unreadable:
            wrong = unreadable([path for path, _ in samples])
            samples = [sample for sample in samples if sample[0] not in wrong]
        return cls(samples, names, transform, views)

    @classmethod
    def unlabelled(cls, folder: Path, transform: Transform, skip_unreadable: bool = False) -> Images:
        """Return all images in a folder and the folders in it; their class is -1."""
        if not folder.is_dir():
            raise TaskError(f"there is no folder {folder} to read images from")
        inside = sorted(path for path in folder.iterdir() if path.is_dir())
        paths = [path for each in [folder, *inside] for path in list_images(each)]
        wrong = unreadable(paths) if skip_unreadable else {}
        samples = [(path, -1) for path in paths if path not in wrong]
        if not samples:
            raise TaskError(f"{folder} holds no images: they end in {' '.join(SUFFIXES)}")
        return cls(samples, [], transform)

    def refuse_single_images(self) -> None:
        """Refuse classes of one image: it has no other of its class to be near to."""
        counts = torch.bincount(
            torch.tensor([label for _, label in self.samples], dtype=torch.long), minlength=len(self.classes)
        )
        few = [name for name, count in zip(self.classes, counts.tolist(), strict=True) if count < 2]
        if few:
            raise TaskError(
                f"these classes have fewer than two images to train on: {_listed(few)}. "
                "Add images, or remove the classes"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = read_image(path)
        if self._views == 1:
            return self._transform(image), label
        return torch.stack([self._transform(image) for _ in range(self._views)]), label


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
