"""Makes image folders to try the recipe on: a folder for each class, of PNG files.

python recipes/metric_learning/images.py digits images
python recipes/metric_learning/images.py shapes images --per-class 60
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from PIL import Image, ImageDraw

from samestep.errors import OutputError, SamestepError

SIZE = 32
Made = Iterator[tuple[str, Image.Image]]
"""Each image after the name of its class."""


def digits(per_class: int | None) -> Made:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, enlarged."""
    from sklearn.datasets import load_digits

    found = load_digits()
    counts = dict.fromkeys(range(10), 0)
    for pixels, label in zip(found.images, found.target, strict=True):
        counts[int(label)] += 1
        if per_class is None or counts[int(label)] <= per_class:
            gray = Image.fromarray((pixels * 255 / 16).round().astype("uint8"))
            yield str(label), gray.resize((SIZE, SIZE), Image.Resampling.BICUBIC).convert("RGB")


def shapes(per_class: int | None) -> Made:
    """Circles, squares, triangles, crosses and rings, of any size, place and color."""
    draw = random.Random(0)
    for name, paint in SHAPES.items():
        for _ in range(per_class or 100):
            ground, color = (tuple(draw.randrange(256) for _ in range(3)) for _ in range(2))
            image = Image.new("RGB", (SIZE, SIZE), ground)
            half = draw.uniform(5, 11)
            x, y = (draw.uniform(half + 1, SIZE - half - 1) for _ in range(2))
            paint(ImageDraw.Draw(image), x, y, half, color)
            yield name, image


def _cross(on: ImageDraw.ImageDraw, x: float, y: float, half: float, color: object) -> None:
    third = half / 3
    on.rectangle((x - half, y - third, x + half, y + third), fill=color)
    on.rectangle((x - third, y - half, x + third, y + half), fill=color)


SHAPES: dict[str, Callable[..., None]] = {
    "circle": lambda on, x, y, r, color: on.ellipse((x - r, y - r, x + r, y + r), fill=color),
    "square": lambda on, x, y, r, color: on.rectangle((x - r, y - r, x + r, y + r), fill=color),
    "triangle": lambda on, x, y, r, color: on.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=color),
    "cross": _cross,
    "ring": lambda on, x, y, r, color: on.ellipse((x - r, y - r, x + r, y + r), outline=color, width=3),
}


def write(made: Made, folder: Path) -> int:
    """Write the images; how many there were."""
    if folder.exists() and any(folder.iterdir()):
        raise OutputError(f"{folder} is not empty: name another folder, or remove it")
    count = 0
    for count, (name, image) in enumerate(made, 1):  # used after the loop
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / name / f"{count:05}.png")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description="Make image folders to try the recipe on.")
    parser.add_argument("kind", choices=["digits", "shapes"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-class", type=int, help="images of each class, at most")
    given = parser.parse_args()
    try:
        count = write({"digits": digits, "shapes": shapes}[given.kind](given.per_class), given.folder)
    except SamestepError as error:
        print(f"images: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {count} images to {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
