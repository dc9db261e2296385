"""PNG files as another library reads them."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from samestep.models.embeddings.report import png


def test_gray_and_color_are_read_back_to_the_byte() -> None:
    gray, color = bytes(range(12)), bytes(range(36))
    with Image.open(io.BytesIO(png(gray, 4, 3))) as image:
        assert (image.mode, image.size, image.tobytes()) == ("L", (4, 3), gray)
    with Image.open(io.BytesIO(png(color, 3, 4))) as image:
        assert (image.mode, image.size, image.tobytes()) == ("RGB", (3, 4), color)


@pytest.mark.parametrize("size", [11, 24])
def test_bytes_that_are_no_such_pixels_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes are no 4x3 pixels"):
        png(bytes(size), 4, 3)
