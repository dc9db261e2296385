"""From spans of characters to a tag for each token, and back: B- begins an entity, I- continues it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from documents import Document, Span

from samestep.errors import TaskError

IGNORED = -100
"""The label of what no loss and no metric counts: special tokens, and padding."""


def labels_of(types: Sequence[str]) -> list[str]:
    """Return the labels of a classifier: O, then B- and I- of each type."""
    return ["O", *(f"{place}-{kind}" for kind in types for place in "BI")]


@dataclass(frozen=True)
class Sample:
    """A document's tokens, or those of a part of one that is too long for the model."""

    document: int
    ids: list[int]
    labels: list[int]
    offsets: list[tuple[int, int]]
    """Where each token is in the document's text; (0, 0) for special ones."""


class Encoder:
    """Makes samples of documents, by a tokenizer that knows where its tokens come from."""

    def __init__(self, tokenizer: Any, labels: Sequence[str], max_length: int) -> None:
        """Args:
        tokenizer: a fast one of transformers.
        labels: what `labels_of` returned.
        max_length: tokens of a sample, at most, special ones included.
        """
        if not tokenizer.is_fast:
            raise TaskError(
                f"{type(tokenizer).__name__} does not tell where in the text its tokens are, so spans cannot become "
                "labels: choose a checkpoint with a fast tokenizer (tokenizer.json)"
            )
        self._tokenizer, self._max_length = tokenizer, max_length
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._longest = max_length - tokenizer.num_special_tokens_to_add()
        if self._longest < 1:
            raise TaskError(f"params.max_length is {max_length}: special tokens alone fill that")

    def samples(self, documents: Sequence[Document]) -> list[Sample]:
        """Return a sample for each document; several for one that is longer than `max_length`."""
        return [
            self._sample(number, document, start, end)
            for number, document in enumerate(documents)
            for start, end in self._parts(number, document)
        ]

    def _parts(self, number: int, document: Document) -> Iterator[tuple[int, int]]:
        """Yield where a text is cut: before a word, and never inside of an entity."""
        text = document.text
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        starts = [_without_blanks(text, *offset)[0] for offset in encoded["offset_mapping"]]
        first, begin = 0, 0
        while len(starts) - first > self._longest:
            places = range(first + self._longest, first, -1)
            cut = next((place for place in places if _is_cut(document, starts[place])), None)
            if cut is None:
                raise TaskError(
                    f"document {number} ({text[begin : begin + 40]!r}...) has more than params.max_length = {self._max_length} "
                    "tokens without a place to cut it at: raise that, or shorten its entities"
                )
            yield begin, len(text[: starts[cut]].rstrip())
            first, begin = cut, starts[cut]
        yield begin, len(text)

    def _sample(self, number: int, document: Document, start: int, end: int) -> Sample:
        encoded = self._tokenizer(
            document.text[start:end], return_offsets_mapping=True, return_special_tokens_mask=True,
            truncation=False, verbose=False,
        )  # fmt: skip
        special = encoded["special_tokens_mask"]
        offsets = [
            (0, 0) if is_special else _without_blanks(document.text, start + one, start + other)
            for is_special, (one, other) in zip(special, encoded["offset_mapping"], strict=True)
        ]
        tags = tags_of(document, offsets, (start, end))
        labels = [IGNORED if is_special else self._numbers[tag] for is_special, tag in zip(special, tags, strict=True)]
        return Sample(number, list(encoded["input_ids"]), labels, offsets)


def _without_blanks(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a token's place without the blanks that some tokenizers count to it."""
    while start < end and text[start].isspace():
        start += 1
    return start, end


def _is_cut(document: Document, place: int) -> bool:
    inside = any(span.start < place < span.end for span in document.spans)
    return document.text[place - 1].isspace() and not inside


def tags_of(document: Document, offsets: Sequence[tuple[int, int]], part: tuple[int, int]) -> list[str]:
    """Return the tag of each token.

    Args:
        document: the document.
        offsets: where its tokens are; empty ones get O.
        part: the characters that the tokens are from.

    Raises:
        TaskError: if an entity has no token of its own: it would be lost silently.
    """
    tags = ["O"] * len(offsets)
    for span in document.spans:
        if not part[0] <= span.start < part[1]:
            continue
        inside = [
            number
            for number, (start, end) in enumerate(offsets)
            if start < end and start < span.end and span.start < end and tags[number] == "O"
        ]
        if not inside:
            raise TaskError(
                f"the entity {document.text[span.start : span.end]!r}, {list(span)}, of the document {document.text[:40]!r}... "
                "has no token of its own: the tokenizer makes one of it and what stands beside it"
            )
        tags[inside[0]] = f"B-{span.type}"
        for number in inside[1:]:
            tags[number] = f"I-{span.type}"
    return tags


def entities_of(tags: Sequence[str]) -> list[Span]:
    """Return the entities of a sequence of tags, by the places of their tokens.

    An I- that continues nothing begins an entity, as in conlleval and seqeval: a classifier may
    predict any sequence.
    """
    found: list[Span] = []
    start, kind = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, its = tag.partition("-")
        if kind and (mark != "I" or its != kind):
            found.append(Span(start, place, kind))
            kind = ""
        if mark != "O" and not kind:
            start, kind = place, its
    return found
