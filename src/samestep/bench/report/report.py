"""The report as a whole: what it is made of, and its page."""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.bench.kinds import present
from samestep.bench.presentation import Presentation, section
from samestep.bench.report.panels import efficiency_panels, memory_panels, phase_panels, throughput_panels
from samestep.bench.report.results import Machine, Result, machines_of
from samestep.bench.report.targets import FAIL, PASS, Target, targets_of
from samestep.checkpoint.files import refuse_existing, write_whole
from samestep.errors import OutputError
from samestep.report.chart import Panel, chart
from samestep.report.page import write_page
from samestep.report.table import html_table, marked

TARGET_COLUMNS = ("target", "limit", "result", "measured", "where, or why not")
_FOLDED = 12
"""Tables with more rows open with a click."""
_DRAWN_HERE = ("scaling",)
"""Kinds whose curves the report draws itself, over all machines and worlds."""


@dataclass(frozen=True)
class Figure:
    """Panels that share a legend."""

    title: str
    panels: Sequence[Panel]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """The results of one kind of measurement on one machine."""

    title: str
    shown: Presentation


@dataclass(frozen=True)
class Report:
    """Everything that was measured, judged and drawn."""

    machines: Sequence[Machine]
    targets: Sequence[Target]
    figures: Sequence[Figure]
    sections: Sequence[Section]

    @property
    def panels(self) -> list[Panel]:
        """Return the panels of a picture."""
        own = [panel for figure in self.figures for panel in figure.panels]
        return own + [panel for section in self.sections for panel in section.shown.panels]

    @property
    def summary(self) -> str:
        """Return how many targets are met, in one line."""
        counts = {state: sum(t.state == state for t in self.targets) for state in (PASS, FAIL)}
        left = len(self.targets) - sum(counts.values())
        return f"{counts[PASS]} of {len(self.targets)} targets pass, {counts[FAIL]} fail, {left} were not measured"

    def target_cells(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of targets."""
        return [(t.name, t.limit, t.state, t.figure or "-", _with_machine(t.why, t.machine)) for t in self.targets]

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {
            "machines": [
                {
                    "label": machine.label,
                    "facts": dict(machine.facts),
                    "files": [str(result.file) for result in machine.results],
                    "rows": {kind: len(machine.rows(kind)) for kind in machine.kinds()},
                }
                for machine in self.machines
            ],
            "targets": [target.as_json() for target in self.targets],
        }


def make_report(results: Sequence[Result]) -> Report:
    """Join, judge and draw.

    Raises:
        TextError: a result is of a kind that is not known here.
    """
    machines = machines_of(results)
    figures = (
        Figure(
            "Scaling efficiency", efficiency_panels(machines),
            "Of ideal scaling, against the smallest world; bands hold the true median in about 95 of 100 measurements.",
        ),
        Figure("Throughput", throughput_panels(machines), "Dashed: ideal, from the smallest world."),
        Figure("Where the time of a step goes", phase_panels(machines), "Medians, on the slowest rank."),
        Figure("Memory", memory_panels(machines), "Grey: predicted from the model and the config."),
    )  # fmt: skip
    drawn = [figure for figure in figures if figure.panels]
    return Report(machines, targets_of(machines), drawn, _sections(machines))


def _sections(machines: Sequence[Machine]) -> list[Section]:
    found = []
    for machine in machines:
        for kind in machine.kinds():
            shown = present(machine.joined(kind))
            panels = [] if kind in _DRAWN_HERE else _named(shown.panels, machine.label)
            title = _with_machine(shown.title, machine.label)
            found.append(Section(title, replace(shown, panels=panels)))
    return found


def _named(panels: Sequence[Panel], label: str) -> list[Panel]:
    """Add the machine to their titles: in a picture they stand beside those of others."""
    return [replace(panel, title=_with_machine(panel.title, label)) for panel in panels]


def _with_machine(text: str, label: str) -> str:
    return f"{text} ({label})" if label else text


def write_report(report: Report, path: Path, force: bool = False) -> None:
    """Write the page."""
    title = "What these machines can do"
    figures = "\n".join(
        f"<h2>{html.escape(figure.title)}</h2><p>{html.escape(figure.note)}</p>{chart(figure.panels, wide=True)}"
        for figure in report.figures
    )
    sections = "\n".join(
        f"<h2>{html.escape(part.title)}</h2>{section(part.shown, wide=True, tag='h3', most=_FOLDED)}"
        for part in report.sections
    )
    body = f"<h1>{title}</h1>\n{_targets(report)}\n{figures}\n{sections}"
    write_page(path, title, body, _facts(report.machines), force)


def _targets(report: Report) -> str:
    marks = {PASS: "kept", FAIL: "broken"}
    rows = []
    for target, cells in zip(report.targets, report.target_cells(), strict=True):
        name, limit, state, figure, why = cells
        mark = f"short {marks.get(target.state, '')}".strip()
        rows.append([name, marked(limit, "short"), marked(state, mark), marked(figure, "short"), why])
    return f"""<h2>Targets</h2><p>{html.escape(report.summary)}. A figure is a median with the range that holds the true one in
about 95 of 100 measurements.</p>
{html_table(TARGET_COLUMNS, rows)}"""


def _facts(machines: Sequence[Machine]) -> dict[str, str]:
    found = {}
    for number, machine in enumerate(machines, start=1):
        name = f"machine {number}" if len(machines) > 1 else "machine"
        facts = machine.facts
        told = [
            f"{key} {' '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in facts.items()
        ]
        found[name] = ", ".join(told)
        found[f"{name}, files"] = ", ".join(str(result.file) for result in machine.results)
    return found


_TARGETS = "targets"


def csv_files(report: Report, path: Path) -> dict[Path, str]:
    """Return what is written where: one file of all rows, or in a folder one for each kind and the targets.

    Args:
        path: A file if its name ends in `.csv`; else a folder.
    """
    kinds = _rows_by_kind(report)
    if path.suffix.lower() == ".csv":
        return {path: _text([{"kind": kind, **row} for kind, rows in kinds.items() for row in rows])}
    targets = [target.as_json() for target in report.targets]
    found = {path / f"{kind}.csv": _text(rows) for kind, rows in kinds.items()}
    return {**found, path / f"{_TARGETS}.csv": _text(list(map(flat, targets)))}


def refuse_csv(path: Path, force: bool) -> None:
    """Refuse what is there already; before the work of a command."""
    if force:
        return
    if path.suffix.lower() == ".csv":
        refuse_existing(path)
    elif path.is_dir():
        refuse_existing(*(file for file in sorted(path.glob("*.csv"))))
    elif path.exists():
        raise OutputError(f"{path} is a file, and its name does not end in .csv: name a folder")


def write_csv(report: Report, path: Path) -> None:
    """Write the files; see `csv_files`.

    Raises:
        OutputError: one cannot be written.
    """
    for file, text in csv_files(report, path).items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
        except OSError as error:
            raise OutputError(f"{file} cannot be written: {error.strerror or error}") from None


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested figures as `efficiency.median`; lists of numbers with spaces between them."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            plain = not any(isinstance(one, (dict, list)) for one in value)
            found[prefix + name] = " ".join(map(str, value)) if plain else json.dumps(value)
        else:
            found[prefix + name] = value
    return found


def _rows_by_kind(report: Report) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for machine in report.machines:
        facts = {"machine": machine.label or " ".join(machine.facts["hosts"])}
        for kind in machine.kinds():
            rows = found.setdefault(kind, [])
            rows += [{**facts, **flat(row)} for row in machine.rows(kind)]
    return found


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
