"""Samples as pictures: gray, color, views, large ones; and what is no image."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samestep.models.embeddings.report import LARGEST, pictures_of


def opened(sample: Any) -> Image.Image:
    made = pictures_of([sample], [0])
    assert made is not None
    return Image.open(io.BytesIO(made[0]))


def test_values_are_scaled_to_those_of_all_samples() -> None:
    made = pictures_of([(torch.full((1, 2, 2), float(n)), 0) for n in (-1, 0, 3)], [0, 1, 2])
    assert made is not None
    levels = [Image.open(io.BytesIO(one)).getpixel((0, 0)) for one in made]
    assert levels == [0, 64, 255]


def test_color_stays_color_and_gray_is_stored_as_gray() -> None:
    assert opened((torch.rand(3, 4, 5), 1)).mode == "RGB"
    assert opened((torch.rand(1, 4, 5).expand(3, 4, 5), 1)).mode == "L"
    assert opened(np.arange(20, dtype=np.uint8).reshape(4, 5)).size == (5, 4)


def test_of_several_views_the_first_is_shown() -> None:
    views = torch.stack([torch.zeros(1, 2, 2), torch.ones(1, 2, 2)])
    views[0, 0, 0, 0] = 0.5
    assert opened((views, 0)).getpixel((0, 0)) == 255  # of its own values the largest


def test_large_images_are_made_small() -> None:
    assert opened(torch.rand(3, 4 * LARGEST, 2 * LARGEST)).size == (LARGEST // 2, LARGEST)


@pytest.mark.parametrize("sample", [torch.rand(6), (torch.rand(8), 1), "text", torch.rand(5, 9, 9), {"x": 1}, ()])
def test_other_samples_are_no_images(sample: Any) -> None:
    assert pictures_of([sample], [0]) is None
