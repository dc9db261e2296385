"""Checks of the guide's English: short sentences and lines, and the words of the field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

LONGEST_SENTENCE = 30
"""Words."""
LONGEST_LINE = 120
"""Characters, of prose: tables and code are as wide as they must be."""
WORDS = {
    r"of (?:its|one's|your|their) own(?=[.,;:)|]| and | or |\n|$)": "its own, your own",
    r"\b(?:one's|ones) own\b": "your own",
    r"\b(?:a|each|every|its|last|takes?|in|by) turns?\b": "iteration, alternate",
    r"\bto the bit\b": "bit-identical",
    r"\bdealt out\b": "distributed",
    r"\bcame to\b": "result",
    r"\bRefused are\b": "is rejected",
    r"\bWho (?:names|can|wants|has)\b": "if you, anyone who",
    r"\bby hand\b": "manually",
    r"\bmany a\b": "many",
    r"\b(?:one|two|lanes?|times?|samples?|batch(?:es)?) a (?:rank|step|lane|second|GPU|node|process)\b": "per",
}
"""Words of ours, by a pattern, and what to write instead."""


def complaints(page: Path) -> list[str]:
    """Return what is wrong with a page's language, each with its line or its first words."""
    text = re.sub(r"^```.*?^```\s*?$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    prose = [line for line in text.splitlines() if not line.startswith(("|", ":::", "#", "!["))]
    found = [f"line of {len(line)} characters: {line[:60]}" for line in prose if len(line) > LONGEST_LINE]
    for sentence in _sentences("\n".join(prose)):
        words = len(sentence.split())
        if words > LONGEST_SENTENCE:
            found.append(f"sentence of {words} words: {sentence[:60]}")
    plain = re.sub(r"`[^`]*`", "code", text)
    for pattern, better in WORDS.items():
        found += [f"{match.group()!r}: write {better}" for match in re.finditer(pattern, plain)]
    return found


def _sentences(prose: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose):
        plain = re.sub(r"`[^`]*`", "code", paragraph)
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        yield from re.split(r"(?<=[.!?:;])(?:\*\*)?\s+(?=[A-Z0-9`*\[(]|code)", " ".join(plain.split()))
