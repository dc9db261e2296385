"""Draws pictures of shapes with the captions that describe them.

A picture has one to four shapes of one kind in a corner: "two red circles at the top left". One caption in ten is held out: no picture
that is trained on has it, so that the caption of such a picture has to be put together from its parts.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

SIZE, CELL, SHAPE = 32, 8, 6
"""Pixels of a picture, of a cell that holds at most one shape, and of a shape; square, all of them."""
COUNTS = ("one", "two", "three", "four")
COLOURS = {
    "red": (230, 50, 40), "green": (40, 190, 70), "blue": (60, 90, 240), "yellow": (240, 220, 60), "white": (240, 240, 240),
}  # fmt: skip
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
ROWS, COLUMNS = ("top", "bottom"), ("left", "right")
PAD, START, END = "<pad>", "<start>", "<end>"
WORDS = (PAD, START, END, *COUNTS, *COLOURS, *SHAPES, *SHAPES.values(), "at", "the", *ROWS, *COLUMNS)
"""The vocabulary; a token is a word's place in it."""
LENGTH = 8
"""Tokens of the longest caption, with its end and without its start."""
_HELD_OUT = 10
"""Of so many captions one is."""


@dataclass(frozen=True)
class Scene:
    """What is in a picture."""

    count: int
    colour: str
    shape: str
    row: int
    column: int

    def caption(self) -> str:
        shape = self.shape if self.count == 1 else SHAPES[self.shape]
        place = f"{ROWS[self.row]} {COLUMNS[self.column]}"
        return f"{COUNTS[self.count - 1]} {self.colour} {shape} at the {place}"


def is_held_out(caption: str) -> bool:
    """Return whether no picture to train on has this caption; by its letters, whatever the seed."""
    return zlib.crc32(caption.encode()) % _HELD_OUT == 0


def draw(rng: np.random.Generator, count: int, held_out: bool = False) -> tuple[np.ndarray, list[str]]:
    """Pictures (count, SIZE, SIZE, 3) of bytes, and their captions.

    Args:
        rng: what everything is drawn with.
        count: how many.
        held_out: whether to draw those with held-out captions, or the others.
    """
    pictures, captions = [], []
    while len(pictures) < count:
        scene = _scene(rng)
        caption = scene.caption()
        if is_held_out(caption) == held_out:
            pictures.append(_paint(rng, scene))
            captions.append(caption)
    return np.stack(pictures), captions


def tokens_of(captions: list[str]) -> np.ndarray:
    """Return each caption as START, its words and END, padded to LENGTH + 1 tokens."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    rows = np.full((len(captions), LENGTH + 1), numbers[PAD], dtype=np.int64)
    for row, caption in zip(rows, captions, strict=True):
        words = [START, *caption.split(), END]
        row[: len(words)] = [numbers[word] for word in words]
    return rows


def text_of(tokens: list[int]) -> str:
    """Return the words of a caption up to its END; anything else that is no word of a caption shows as it is."""
    words = [WORDS[token] for token in tokens]
    return " ".join(words[: words.index(END)] if END in words else words)


def _scene(rng: np.random.Generator) -> Scene:
    kinds = (COUNTS, COLOURS, SHAPES, ROWS, COLUMNS)
    count, colour, shape, row, column = (int(rng.integers(len(kind))) for kind in kinds)
    return Scene(count + 1, list(COLOURS)[colour], list(SHAPES)[shape], row, column)


def _masks() -> dict[str, np.ndarray]:
    y, x = np.mgrid[:SHAPE, :SHAPE]
    middle = (SHAPE - 1) / 2
    return {
        "circle": (y - middle) ** 2 + (x - middle) ** 2 <= (SHAPE / 2) ** 2 - 1,
        "square": np.ones((SHAPE, SHAPE), dtype=bool),
        "triangle": np.abs(x - middle) <= (y + 1) / 2,
        "cross": (np.abs(x - middle) < 1) | (np.abs(y - middle) < 1),
    }


_MASKS = _masks()


def _paint(rng: np.random.Generator, scene: Scene) -> np.ndarray:
    """Return each shape in a cell of its own in the scene's corner, moved a little and of any brightness."""
    picture = np.full((SIZE, SIZE, 3), rng.integers(60), dtype=np.float32)
    corner = SIZE // 2 // CELL
    for cell in rng.permutation(corner**2)[: scene.count]:
        y, x = divmod(int(cell), corner)
        top, left = rng.integers(CELL - SHAPE + 1, size=2)
        top += (scene.row * corner + y) * CELL
        left += (scene.column * corner + x) * CELL
        spot = picture[top : top + SHAPE, left : left + SHAPE]
        spot[_MASKS[scene.shape]] = np.array(COLOURS[scene.colour]) * rng.uniform(0.7, 1.0)
    picture += rng.normal(0, 6, picture.shape)
    return picture.clip(0, 255).astype(np.uint8)
