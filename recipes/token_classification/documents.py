"""Documents with annotated spans of characters: read from JSON lines, with all mistakes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from samestep.errors import TaskError, TextError
from samestep.parsing.files import read_lines
from samestep.parsing.json_text import parse_json

TYPES = ("DESIGNATION", "EDUCATION", "EMAIL", "EXPERIENCE", "LOCATION", "NAME", "PHONE", "SKILL")
"""What the made-up documents are annotated with."""
MOST = 10
"""Mistakes of a file that are listed."""


class Span(NamedTuple):
    """An entity: the characters from `start` up to `end`, which is not part of it."""

    start: int
    end: int
    type: str


@dataclass(frozen=True)
class Document:
    """A text, and where its entities are, in the order of the text."""

    text: str
    spans: tuple[Span, ...] = ()


def read_documents(path: Path, types: Sequence[str] | None) -> list[Document]:
    """Return the documents of a file, one a line: `{"text": ..., "annotations": [[start, end, type], ...]}`.

    Args:
        path: the file.
        types: the types that annotations may have; any if None.

    Raises:
        TaskError: listing what is wrong, by line.
    """
    found: list[Document] = []
    mistakes: list[str] = []
    for number, line in enumerate(_lines(path), 1):
        if line.isspace():
            continue
        try:
            found.append(_document(parse_json(line), types))
        except TextError as error:
            mistakes.append(f"line {number}: {error}")
    if mistakes:
        shown = [*mistakes[:MOST], *(["..."] if len(mistakes) > MOST else [])]
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        raise TaskError("\n  - ".join([f"{path} has {count}:", *shown]))
    if not found:
        raise TaskError(f"{path} holds no document: give one a line, as JSON")
    return found


def refuse_missing(data: Path) -> None:
    """Raise if there is no folder of documents."""
    if not data.is_dir():
        raise TaskError(
            f"there is no folder {data}, which params.data names: made_up.py writes one, or put "
            "train.jsonl and valid.jsonl of your own there"
        )


def _lines(path: Path) -> list[str]:
    try:
        return list(read_lines(path))
    except TextError as error:
        raise TaskError(
            f"{path} {error}: give documents as JSON lines, in params.data train.jsonl and valid.jsonl"
        ) from None


def _document(value: Any, types: Sequence[str] | None) -> Document:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise TextError('is no document: write {"text": "...", "annotations": [[start, end, "TYPE"]]}')
    text, given = value["text"], value.get("annotations", [])
    if not text.strip():
        raise TextError("has an empty text")
    if not isinstance(given, list):
        raise TextError("has annotations that are no list")
    spans = sorted(_span(annotation, text, types) for annotation in given)
    for one, other in pairwise(spans):
        if other.start < one.end:
            raise TextError(
                f"has annotations that overlap, {list(one)} and {list(other)}: a token has one label, so keep one"
            )
    return Document(text, tuple(spans))


def _span(given: Any, text: str, types: Sequence[str] | None) -> Span:
    if not (isinstance(given, list) and [type(part) for part in given] == [int, int, str]):
        raise TextError(f"has the annotation {given!r}: write [start, end, type]")
    start, end, kind = given
    if not 0 <= start < end <= len(text):
        raise TextError(
            f"has the annotation {given!r}, and its text the characters 0 to {len(text)}: "
            "start must be before end, and both inside"
        )
    if types is not None and kind not in types:
        near = get_close_matches(kind, types, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TextError(
            f"has the annotation {given!r}, whose type is none of {', '.join(types)}: {hint}params.types lists those there are"
        )
    inside = text[start:end]
    # Blanks around an entity are no part of it: some tokenizers put them into the next token.
    start += len(inside) - len(inside.lstrip())
    end -= len(inside) - len(inside.rstrip())
    if start >= end:
        raise TextError(f"has the annotation {given!r}, which holds blanks only")
    return Span(start, end, kind)
