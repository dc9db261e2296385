"""From an image to a tensor: plain for validation, augmented for training.

The default augmentation is torch's own operations; albumentations' are an option, from YAML:

    params:
      albumentations:
        - RandomResizedCrop: {size: [32, 32], scale: [0.7, 1.0]}
        - OneOf: {transforms: [{MedianBlur: {}}, {HueSaturationValue: {}}], p: 0.3}

Everything is drawn from torch's generator, which a run sets for each lane.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from samestep.errors import MissingExtraError, TaskError

MEAN, SPREAD = 0.5, 0.25


class Plain:
    """The image, resized and normalized."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, image: Image.Image) -> Tensor:
        return normalized(torch.from_numpy(_pixels(image, self._size)))


class Augmented:
    """Turned, moved, enlarged, with another contrast and brightness, and noisy; each time anew."""

    def __init__(
        self, size: int, degrees: float = 12, shift: float = 0.1, zoom: float = 0.15, noise: float = 0.05
    ) -> None:
        self._size = size
        self._degrees, self._shift, self._zoom, self._noise = degrees, shift, zoom, noise

    def __call__(self, image: Image.Image) -> Tensor:
        x = torch.from_numpy(_pixels(image, self._size)).unsqueeze(0)
        turn, zoom, right, down, contrast, light = (2 * torch.rand(6) - 1).tolist()
        angle, scale = math.radians(self._degrees * turn), 1 + self._zoom * zoom
        cos, sin = scale * math.cos(angle), scale * math.sin(angle)
        matrix = torch.tensor([[cos, -sin, 2 * self._shift * right], [sin, cos, 2 * self._shift * down]])
        grid = F.affine_grid(matrix.unsqueeze(0), list(x.shape), align_corners=False)
        moved = F.grid_sample(x, grid, padding_mode="border", align_corners=False)[0]
        moved = (moved - MEAN) * (1 + 0.2 * contrast) + MEAN + 0.1 * light
        return normalized(moved + self._noise * torch.randn_like(moved))


class Albumentations:
    """A sequence of albumentations' transforms, by their names."""

    def __init__(self, size: int, transforms: Sequence[Any]) -> None:
        try:
            import albumentations
        except ImportError:
            raise MissingExtraError("params.albumentations", "albumentations") from None
        self._size = size
        self._compose = albumentations.Compose([_build(albumentations, one) for one in transforms])

    def __call__(self, image: Image.Image) -> Tensor:
        # From 1.4.15 on it has generators of its own, which no lane's stream reaches.
        if hasattr(self._compose, "set_random_seed"):
            self._compose.set_random_seed(int(torch.randint(2**31, ())))
        made = self._compose(image=np.asarray(image))["image"]
        return normalized(torch.from_numpy(_pixels(Image.fromarray(made), self._size)))


def training_transform(size: int, albumentations: Sequence[Any] | None) -> Any:
    """Return what training images go through."""
    return Augmented(size) if albumentations is None else Albumentations(size, albumentations)


def normalized(x: Tensor) -> Tensor:
    """Values from 0 to 1, around 0."""
    return (x - MEAN) / SPREAD


def _pixels(image: Image.Image, size: int) -> np.ndarray:
    """(3, size, size), from 0 to 1."""
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 255


def _build(library: Any, entry: Any) -> Any:
    """`Name`, or `{Name: {argument: value}}`; `transforms` among the arguments is a list of such."""
    if isinstance(entry, str):
        entry = {entry: {}}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise TaskError(f"params.albumentations has the entry {entry!r}: write Name, or Name: {{argument: value}}")
    name, arguments = next(iter(entry.items()))
    made = getattr(library, str(name), None)
    if not isinstance(made, type):
        raise TaskError(f"params.albumentations names {name!r}, which albumentations does not have")
    given = {key: _tuples(value) for key, value in (arguments or {}).items() if key != "transforms"}
    if "transforms" in (arguments or {}):
        given["transforms"] = [_build(library, inner) for inner in arguments["transforms"]]
    try:
        return made(**given)
    except (TypeError, ValueError) as error:
        raise TaskError(f"params.albumentations: {name} does not take {given}: {error}") from None


def _tuples(value: Any) -> Any:
    """YAML has lists where albumentations wants tuples."""
    return tuple(_tuples(inner) for inner in value) if isinstance(value, (list, tuple)) else value
