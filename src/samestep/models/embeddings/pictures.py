"""Samples as small pictures, where they are images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.report.png import png

LARGEST = 64
"""Pixels of a picture's longer side."""


def pictures_of(dataset: Any, indices: Sequence[int]) -> list[bytes] | None:
    """A PNG file of each sample; None if they are no images.

    A sample is an image if it, or its first element, is a tensor or array (1 or 3, height, width) or
    (height, width), of which several views may be stacked. Values are scaled to those of all.

    Args:
        dataset: what the samples are of.
        indices: which ones.
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
