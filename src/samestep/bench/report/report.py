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
from samestep.bench.report.results import Machine, Result, machines_of
from samestep.bench.report.targets import FAIL, PASS, Target, targets_of
from samestep.bench.scaling_panels import efficiency_panels, phase_panels, throughput_panels
from samestep.checkpoint.files import write_whole
from samestep.errors import OutputError
from samestep.report.chart import Panel, chart
from samestep.report.page import write_page
from samestep.report.table import html_table, marked

TITLE = "What these machines can do"
TARGET_COLUMNS = ("target", "limit", "result", "measured", "where, or why not")
_FOLDED = 12
"""Tables with more rows open with a click."""
_DRAWN_HERE = ("scaling",)
"""Kinds whose curves the report draws itself, over all machines and worlds."""


@dataclass(frozen=True)
class Report:
    """Everything that was measured, judged and drawn."""

    machines: Sequence[Machine]
    targets: Sequence[Target]
    figures: Sequence[tuple[str, str, Sequence[Panel]]]
    """Title, note, and panels that share a legend."""
    sections: Sequence[Presentation]
    """Results of one kind of measurement on one machine."""

    @property
    def panels(self) -> list[Panel]:
        """Return the panels of a picture."""
        own = [panel for *_, panels in self.figures for panel in panels]
        return own + [panel for shown in self.sections for panel in shown.panels]

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
    rows = [(machine.label, row) for machine in machines for row in machine.rows("scaling")]
    figures = (
        (
            "Scaling efficiency",
            "Of ideal scaling, against the smallest world; bands hold the true median in about 95 of 100 measurements.",
            efficiency_panels(rows),
        ),
        ("Throughput", "Dashed: ideal, from the smallest world.", throughput_panels(rows)),
        ("Where the time of a step goes", "Medians, on the slowest rank.", phase_panels(rows)),
    )
    drawn = [figure for figure in figures if figure[-1]]
    return Report(machines, targets_of(machines), drawn, _sections(machines))


def _sections(machines: Sequence[Machine]) -> list[Presentation]:
    found = []
    for machine in machines:
        for kind in machine.kinds():
            shown = present(machine.joined(kind))
            panels = [] if kind in _DRAWN_HERE else _named(shown.panels, machine.label)
            found.append(replace(shown, title=_with_machine(shown.title, machine.label), panels=panels))
    return found


def _named(panels: Sequence[Panel], label: str) -> list[Panel]:
    """Add the machine to their titles: in a picture they stand beside those of others."""
    return [replace(panel, title=_with_machine(panel.title, label)) for panel in panels]


def _with_machine(text: str, label: str) -> str:
    return f"{text} ({label})" if label else text


def write_report(report: Report, path: Path, force: bool = False) -> None:
    """Write the page."""
    figures = "\n".join(
        f"<h2>{html.escape(title)}</h2><p>{html.escape(note)}</p>{chart(panels, wide=True)}"
        for title, note, panels in report.figures
    )
    sections = "\n".join(
        f"<h2>{html.escape(shown.title)}</h2>{section(shown, wide=True, tag='h3', most=_FOLDED)}"
        for shown in report.sections
    )
    body = f"<h1>{TITLE}</h1>\n{_targets(report)}\n{figures}\n{sections}"
    write_page(path, TITLE, body, _facts(report.machines), force)


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
        parts = [
            f"{key} {' '.join(map(str, value)) if isinstance(value, list) else value}" for key, value in facts.items()
        ]
        found[name] = ", ".join(parts)
        found[f"{name}, files"] = ", ".join(str(result.file) for result in machine.results)
    return found


def write_csv(report: Report, path: Path) -> None:
    """Write all rows, each with its kind.

    Raises:
        OutputError: it cannot be written.
    """
    rows: list[dict[str, Any]] = []
    for machine in report.machines:
        facts = {"machine": machine.label or " ".join(machine.facts["hosts"])}
        rows += [{"kind": kind, **facts, **flat(row)} for kind in machine.kinds() for row in machine.rows(kind)]
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, file.getvalue())
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


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
