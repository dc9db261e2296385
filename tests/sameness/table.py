"""The matrix as a page: docs/sameness.md."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date

import torch

from tests.sameness.case import Case
from tests.sameness.cells import BAD, FAILED, FOUND, IDENTICAL, REFUSED, Cell
from tests.sameness.ways import Way

HEAD = """# The sameness matrix

```bash
{command}
```

wrote this page on {date} in {minutes:.0f} minutes: {cells} trainings with torch {torch} and Python {python} on
{device}. **{summary}.**

A row is a small training, a column a way to run it. Each cell is one or several whole trainings. Every loss, every
sample and every bit of the final state is compared with the same training on one rank.

- **yes**: identical, 0 ULP apart, at each world size of the column
- **refused**: ends before the first update, with the reason
- **found**: a mistake in the task, which `samestep verify --resumed` finds
- **DIFFERENT**, **FAILED**: the promise is broken; `make sameness` then exits with 1

| column | how the training is run | world sizes |
|---|---|---|
"""


def page(
    cases: Sequence[Case], ways: Sequence[Way], cells: Sequence[Cell], command: str, device: str, seconds: float
) -> str:
    """The whole page."""
    notes: dict[str, int] = {}
    usual = {way.name: usual_worlds(cells, way.name) for way in ways}
    sections = dict.fromkeys(case.section for case in cases)
    tables = [
        _section(section, [c for c in cases if c.section == section], ways, cells, usual, notes) for section in sections
    ]
    head = HEAD.format(
        command=command, date=date.today(), torch=torch.__version__,
        python=platform.python_version(), cells=len(cells), minutes=max(1.0, seconds / 60),
        device=device_name(device), summary=summary(cells),
    )  # fmt: skip
    columns = "".join(f"| {way.name} | {way.about} | {usual[way.name] or '-'} |\n" for way in ways)
    reasons = "".join(f"| {number} | {text} |\n" for text, number in notes.items())
    return head + columns + "".join(tables) + (f"\n## Reasons\n\n| | |\n|---|---|\n{reasons}" if notes else "")


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


def usual_worlds(cells: Sequence[Cell], way: str) -> str:
    """Return the numbers of ranks on which most trainings of a column are identical."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell.way == way and cell.verdict == IDENTICAL:
            found.setdefault(cell.case, []).append(cell.world)
    counts = Counter(", ".join(worlds) for worlds in found.values())
    return counts.most_common(1)[0][0] if counts else ""


def _section(
    section: str,
    cases: Sequence[Case],
    ways: Sequence[Way],
    cells: Sequence[Cell],
    usual: Mapping[str, str],
    notes: dict[str, int],
) -> str:
    rows = []
    for case in cases:
        mine = [cell for cell in cells if cell.case == case.name]
        words = [_words([c for c in mine if c.way in (way.name, "all")], usual[way.name], notes) for way in ways]
        rows.append(f"| {case.title} | {' | '.join(words)} |\n")
    titles = " | ".join(way.name for way in ways)
    return f"\n## {section}\n\n| | {titles} |\n|---|{'---|' * len(ways)}\n{''.join(rows)}"


def _words(cells: Sequence[Cell], usual: str, notes: dict[str, int]) -> str:
    """One cell of the page: what was found, and on which numbers of ranks if not on the column's usual ones."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        groups.setdefault((cell.verdict, one_line(cell)), []).append(cell.world)
    words = []
    for (verdict, reason), worlds in groups.items():
        shown = f"**{verdict}**" if verdict in BAD else "yes" if verdict == IDENTICAL else verdict
        note = f" [{notes.setdefault(reason, len(notes) + 1)}]" if reason else ""
        where = ", ".join(worlds)
        is_whole = len(groups) == 1 and (where == usual or verdict == REFUSED)
        words.append(f"{shown}{note}" if is_whole else f"{shown}{note}: {where}".removesuffix(": "))
    return "; ".join(words) or "-"


def one_line(cell: Cell) -> str:
    """A reason short enough for a list: of a traceback, its last line."""
    text = cell.reason.strip()
    if cell.verdict == FAILED and "Traceback" in text:
        text = [line for line in text.splitlines() if line.strip()][-1]
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 400 else f"{text[:400]} ..."
