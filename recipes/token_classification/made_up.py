"""Writes made-up résumés with annotated entities, and trains a tokenizer on them.

python recipes/token_classification/made_up.py data --train 2400 --valid 300

Nobody in them exists: names are drawn from syllables, addresses end in example.org, and numbers are
those kept for fiction. Some words are of one type here and of another there (Austin, Java), and some
look like entities and are none, so the surroundings have to be read.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from documents import Document, Span
from wordpiece import train_tokenizer

from samestep.errors import OutputError, SamestepError, UserError

FIRST = (
    "Ada", "Amir", "Austin", "Bela", "Carlos", "Chen", "Dana", "Elif", "Florence", "Goran", "Hana", "Ines", "Ivan",
    "Jordan", "Kofi", "Lena", "Madison", "Mei", "Nadia", "Omar", "Priya", "Quentin", "Rosa", "Sydney", "Tomas", "Uma", "Yusuf",
)  # fmt: skip
SYLLABLES = (
    "bel", "dar", "fen", "gor", "hal", "jin", "kas", "lor", "mar", "nev", "ost", "pel", "ran", "sol", "tur", "vik", "wen", "zel",
)  # fmt: skip
CITIES = (
    "Austin", "Bergen", "Florence", "Ghent", "Java", "Jordan", "Kyoto", "Leeds", "Lima", "Madison", "Nairobi", "New Haven",
    "Oslo", "Porto", "Quito", "San Marino", "Sydney", "Tartu", "Utrecht", "Varna",
)  # fmt: skip
SKILLS = (
    "C++", "Docker", "Excel", "Go", "Java", "Kubernetes", "Linux", "PyTorch", "Python", "R", "Rust", "SQL", "Spark", "Tableau",
    "data analysis", "machine learning", "project management", "public speaking", "technical writing",
)  # fmt: skip
LEVELS = ("Senior", "Junior", "Lead", "Chief", "Deputy")
FIELDS = ("Data", "Sales", "Software", "Support", "Marketing", "Research", "Network")
ROLES = ("Engineer", "Manager", "Analyst", "Scientist", "Consultant", "Architect")
DEGREES = ("BSc in", "MSc in", "PhD in", "Master of", "Bachelor of", "Diploma in")
SUBJECTS = ("Physics", "Chemistry", "Economics", "Computer Science", "Statistics", "Fine Arts", "History", "Law")
ASIDES = (
    "References are available on request.", "The company was founded 5 years ago.", "The team of 12 works in shifts.",
    "Our office is near the old harbour.", "Orders with number 4471 were shipped.", "He reports to the board.",
    "The manager of the archive was on leave.", "Lectures in history are open to all.", "Tickets cost 30 and are sold online.",
    "Support is answered within 2 days.",
)  # fmt: skip

Draw = Callable[[random.Random], str]


def _name(rng: random.Random) -> str:
    surname = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()
    return f"{rng.choice(FIRST)} {surname}"


def _email(rng: random.Random) -> str:
    mark = rng.choice((".", "_", ""))
    name = f"{rng.choice(FIRST).lower()}{mark}{rng.choice(SYLLABLES)}{rng.choice(SYLLABLES)}"
    return f"{name}@{rng.choice(('mail.', 'post.', ''))}example.org"


def _phone(rng: random.Random) -> str:
    number = f"555-01{rng.randint(0, 99):02d}"
    return rng.choice((f"+1 {rng.randint(200, 989)} {number}", f"({rng.randint(200, 989)}) {number}", number))


def _designation(rng: random.Random) -> str:
    level = [rng.choice(LEVELS)] if rng.random() < 0.6 else []
    return " ".join([*level, rng.choice(FIELDS), rng.choice(ROLES)])


def _experience(rng: random.Random) -> str:
    unit = rng.choice(("years", "months"))
    return f"{rng.choice(('over ', 'nearly ', ''))}{rng.randint(2, 30)} {unit}"


DRAWS: dict[str, Draw] = {
    "DESIGNATION": _designation,
    "EDUCATION": lambda rng: f"{rng.choice(DEGREES)} {rng.choice(SUBJECTS)}",
    "EMAIL": _email,
    "EXPERIENCE": _experience,
    "LOCATION": lambda rng: rng.choice(CITIES),
    "NAME": _name,
    "PHONE": _phone,
    "SKILL": lambda rng: rng.choice(SKILLS),
}
PARTS = (
    ("{NAME} lives in {LOCATION}.", "{NAME}, {DESIGNATION}", "Name: {NAME}\nAddress: {LOCATION}", "My name is {NAME} and I am from {LOCATION}."),
    ("Contact: {EMAIL}, {PHONE}", "Write to {EMAIL} or call {PHONE}.", "Phone {PHONE}", "Mail: {EMAIL}"),
    ("Works as {DESIGNATION} in {LOCATION}.", "{DESIGNATION}, {LOCATION}, {EXPERIENCE}", "Employed as {DESIGNATION} for {EXPERIENCE}."),
    ("Holds a {EDUCATION}.", "Education: {EDUCATION}, {LOCATION}", "Studied in {LOCATION}: {EDUCATION}"),
    # Without anything between them: only B- tells where one ends and the next begins.
    ("Skills: {SKILL} {SKILL} {SKILL}", "Knows {SKILL}, {SKILL} and {SKILL}.", "{EXPERIENCE} of {SKILL}", "Has used {SKILL} for {EXPERIENCE}."),
)  # fmt: skip
"""A document has a line of three rows, in any order, and an aside now and then."""


def make_document(rng: random.Random) -> Document:
    """Return a document, drawn from a generator."""
    lines = [rng.choice(choices) for choices in rng.sample(PARTS, 3)]
    lines += rng.sample(ASIDES, rng.randint(0, 1))
    rng.shuffle(lines)
    text, spans = "", []
    for line in lines:
        for number, piece in enumerate(line.replace("{", "}").split("}")):
            if number % 2:  # what stood in braces
                value = DRAWS[piece](rng)
                spans.append(Span(len(text), len(text) + len(value), piece))
                text += value
            else:
                text += piece
        text += rng.choice(("\n", " "))
    return Document(text, tuple(spans))


def make_documents(count: int, seed: int | str) -> list[Document]:
    """As many documents, the same for the same seed."""
    rng = random.Random(seed)
    return [make_document(rng) for _ in range(count)]


def write_documents(path: Path, documents: Sequence[Document]) -> None:
    """One document a line."""
    lines = [
        json.dumps({"text": document.text, "annotations": [list(span) for span in document.spans]})
        for document in documents
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make up annotated documents, and a tokenizer.")
    parser.add_argument("data", type=Path, help="the folder to write")
    parser.add_argument("--train", type=int, default=2400, help="documents to train on")
    parser.add_argument("--valid", type=int, default=300, help="documents to validate with")
    parser.add_argument("--vocabulary", type=int, default=1000, help="tokens of the tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        if min(given.train, given.valid) < 1:
            raise UserError(f"--train is {given.train}, --valid is {given.valid}: give 1 or more")
        if given.data.exists() and any(given.data.iterdir()):
            raise OutputError(f"{given.data} is not empty: give another folder")
        given.data.mkdir(parents=True, exist_ok=True)
        for name, count in (("train", given.train), ("valid", given.valid)):
            documents = make_documents(count, f"{given.seed} {name}")
            write_documents(given.data / f"{name}.jsonl", documents)
        train_tokenizer(given.data, given.vocabulary)
    except SamestepError as error:
        print(f"made_up: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {given.data}: {given.train} documents to train on, {given.valid} to validate with")
    return 0


if __name__ == "__main__":
    sys.exit(main())
