"""The matrix as a page: docs/sameness.md."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from datetime import date

import torch

from tests.sameness.case import Case
from tests.sameness.cells import BAD, FAILED, FOUND, IDENTICAL, REFUSED, Cell
from tests.sameness.ways import Way

HEAD = """# The sameness matrix

```bash
{command}
```

wrote this page on {date}: torch {torch}, Python {python}, {device}; {cells} trainings in {minutes:.0f} minutes.
**{summary}.**

A row is a small training, a column a way to run it. Every cell is one whole training, or several at different
numbers of ranks, and every loss, every sample and every bit of the final state (weights, buffers, optimizer
states, averages, metrics) is compared with those of the same training on one rank.

- **identical**: 0 ULP apart, on each of these numbers of ranks
- **refused**: ends before the first update, with the reason
- **found**: a mistake in the task, which `samestep verify --resumed` finds
- **DIFFERENT**, **FAILED**: the promise is broken; `make sameness` then exits with 1

| column | how the training is run |
|---|---|
"""


def page(
    cases: Sequence[Case], ways: Sequence[Way], cells: Sequence[Cell], command: str, device: str, seconds: float
) -> str:
    """The whole page."""
    notes: dict[str, int] = {}
    sections = dict.fromkeys(case.section for case in cases)
    tables = [_section(section, [c for c in cases if c.section == section], ways, cells, notes) for section in sections]
    head = HEAD.format(
        command=command, date=date.today(), torch=torch.__version__,
        python=platform.python_version(), cells=len(cells), minutes=max(1.0, seconds / 60),
        device=device_name(device), summary=summary(cells),
    )  # fmt: skip
    columns = "".join(f"| {way.name} | {way.about} |\n" for way in ways)
    reasons = "".join(f"{number}. {text}\n" for text, number in notes.items())
    return head + columns + "".join(tables) + (f"\n## Reasons\n\n{reasons}" if notes else "")


def device_name(device: str) -> str:
    if device == "cuda":
        return f"ranks that share one {torch.cuda.get_device_name()}"
    return f"CPUs ({platform.machine()}), one thread for each rank"


def summary(cells: Sequence[Cell]) -> str:
    """Such as `810 identical, 12 refused`."""
    counts = Counter(cell.verdict for cell in cells)
    order = [IDENTICAL, REFUSED, FOUND, *BAD]
    found = [f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict]]
    return ", ".join(found)


def _section(
    section: str, cases: Sequence[Case], ways: Sequence[Way], cells: Sequence[Cell], notes: dict[str, int]
) -> str:
    rows = []
    for case in cases:
        mine = [cell for cell in cells if cell.case == case.name]
        words = [_words([c for c in mine if c.way in (way.name, "all")], notes) for way in ways]
        rows.append(f"| {case.title} | {' | '.join(words)} |\n")
    titles = " | ".join(way.name for way in ways)
    return f"\n## {section}\n\n| | {titles} |\n|---|{'---|' * len(ways)}\n{''.join(rows)}"


def _words(cells: Sequence[Cell], notes: dict[str, int]) -> str:
    """One cell of the page: what was found, and on which numbers of ranks."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        groups.setdefault((cell.verdict, one_line(cell)), []).append(cell.world)
    words = []
    for (verdict, reason), worlds in groups.items():
        shown = f"**{verdict}**" if verdict in BAD else verdict
        note = f" [{notes.setdefault(reason, len(notes) + 1)}]" if reason else ""
        words.append(f"{shown}{note}: {', '.join(worlds)}".removesuffix(": "))
    return "; ".join(words) or "-"


def one_line(cell: Cell) -> str:
    """A reason short enough for a list: of a traceback, its last line."""
    text = cell.reason.strip()
    if cell.verdict == FAILED and "Traceback" in text:
        text = [line for line in text.splitlines() if line.strip()][-1]
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 400 else f"{text[:400]} ..."
