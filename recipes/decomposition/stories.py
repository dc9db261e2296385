"""Small stories, made up word by word: who found what where, and how that was."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

ANIMALS = ("fox", "owl", "bear", "frog", "hen", "mouse")
NAMES = {"anna": "she", "ben": "he", "cleo": "she", "dan": "he"}
THINGS = {"apple": "red", "leaf": "green", "stone": "grey", "shell": "white", "plum": "blue"}
PLACES = ("garden", "forest", "river", "hill")
FEELINGS = ("happy", "sad", "proud", "tired")
END = "."
WORDS = (
    END, "the", "a", "found", "gave", "it", "to", "in", "was", "very", "then", "and", "went", "home", "because", "liked",
    *ANIMALS, *NAMES, "she", "he", *THINGS, *sorted(set(THINGS.values())), *PLACES, *FEELINGS,
)  # fmt: skip
NUMBER_OF = {word: number for number, word in enumerate(WORDS)}


def story(rng: np.random.Generator) -> Iterator[str]:
    """Yield a story's words. A thing has its colour, a name its pronoun: what comes next can be known by what came
    before.
    """
    name, thing = rng.choice(list(NAMES)), rng.choice(list(THINGS))
    animal, place, feeling = rng.choice(ANIMALS), rng.choice(PLACES), rng.choice(FEELINGS)
    pronoun = NAMES[str(name)]
    sentences = [
        f"{name} found a {THINGS[str(thing)]} {thing} in the {place}",
        f"{pronoun} gave the {thing} to the {animal}",
        f"the {animal} was very {feeling}" if rng.random() < 0.5 else f"the {animal} liked it",
        f"then {name} and the {animal} went home because {pronoun} was {feeling}",
    ]
    for sentence in sentences:
        yield from sentence.split()
        yield END


def stories(rng: np.random.Generator, count: int, length: int) -> np.ndarray:
    """Texts of so many words each, as numbers; each begins with a story, and goes on with others."""
    rows = np.empty((count, length), dtype=np.int64)
    for row in rows:
        words: list[int] = []
        while len(words) < length:
            words.extend(NUMBER_OF[word] for word in story(rng))
        row[:] = words[:length]
    return rows
