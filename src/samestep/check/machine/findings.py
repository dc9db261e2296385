"""The result of a check: plain values that ranks exchange, and that become rows, a report or JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from samestep.words import counted

Severity = Literal["ok", "note", "warning", "error"]

SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""From the mildest to the worst."""

EXIT_CODES: dict[Severity, int] = {"ok": 0, "note": 0, "warning": 5, "error": 6}
"""Exit codes of `samestep check`, by its worst finding."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Without ranks it holds for all of them. Ranks that found the same share one finding, so
    `what` contains nothing that differs from rank to rank by design.
    """

    check: str
    severity: Severity
    what: str
    why: str = ""
    """Why it matters."""
    advice: str = ""
    """What to do."""
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """The rank that found something, and its host."""

    rank: int
    host: str


def ok(check: str, what: str) -> Finding:
    """Checked, and fine."""
    return Finding(check, "ok", what)


def note(check: str, what: str, why: str = "", advice: str = "") -> Finding:
    """Something to know."""
    return Finding(check, "note", what, why, advice)


def warning(check: str, what: str, why: str = "", advice: str = "") -> Finding:
    """Something that costs time, or may go wrong."""
    return Finding(check, "warning", what, why, advice)


def failure(check: str, what: str, why: str = "", advice: str = "") -> Finding:
    """An error: something that will go wrong."""
    return Finding(check, "error", what, why, advice)


def at(findings: Iterable[Finding], places: Sequence[Place]) -> list[Finding]:
    """Return the findings with the ranks and hosts they hold for, unless they already have them."""
    ranks = tuple(place.rank for place in places)
    hosts = tuple(sorted({place.host for place in places}))
    return [f if f.ranks else replace(f, ranks=ranks, hosts=hosts) for f in findings]


def merge(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding where several ranks found the same; checks stay in the order they came in."""
    merged: dict[Finding, Finding] = {}
    checks: list[str] = []
    for finding in findings:
        key = replace(finding, ranks=(), hosts=())
        known = merged.get(key, key)
        merged[key] = replace(
            key,
            ranks=tuple(sorted({*known.ranks, *finding.ranks})),
            hosts=tuple(sorted({*known.hosts, *finding.hosts})),
        )
        if finding.check not in checks:
            checks.append(finding.check)
    return tuple(sorted(merged.values(), key=lambda finding: checks.index(finding.check)))


@dataclass(frozen=True)
class CheckReport:
    """Everything that was found: the same object on every rank that could join the others."""

    findings: tuple[Finding, ...]
    world: int = 1
    rank: int | None = None
    """Only for a rank that stayed alone: its number. The findings are then its own."""
    alone: bool = False
    """True if the ranks could not reach each other, so that each has its own result."""

    @property
    def worst(self) -> Severity:
        return max((f.severity for f in self.findings), key=SEVERITIES.index, default="ok")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.worst]

    def rows(self) -> list[tuple[str, ...]]:
        """(check, severity, what was found, ranks) for a table."""
        return [(f.check, f.severity, f.what, self.where(f)) for f in self.findings]

    def where(self, finding: Finding) -> str:
        """Return the ranks of a finding as people write them: '0-2, 5 on n1'."""
        if self.world == 1 or not finding.ranks:
            return ""
        if len(finding.ranks) == self.world:
            return "all"
        hosts = {host for f in self.findings for host in f.hosts}
        names = f" on {', '.join(finding.hosts)}" if len(hosts) > 1 else ""
        return spans(finding.ranks) + names

    def as_json(self) -> dict[str, Any]:
        return {
            "worst": self.worst,
            "exit_code": self.exit_code,
            "world": self.world,
            "rank": self.rank,
            "alone": self.alone,
            "findings": [asdict(finding) for finding in self.findings],
        }


def spans(numbers: Sequence[int]) -> str:
    """Sorted numbers with consecutive ones joined: '0-2, 5'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


_STYLES: dict[Severity, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def print_report(result: CheckReport, as_json: bool = False) -> None:
    """Print it all, and flush: a launcher may end this process any time now."""
    if as_json:
        print(json.dumps(result.as_json()), flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140)
    if result.alone and result.world > 1:
        console.print(_heading(result), style="bold", markup=False)
    several = result.world > 1 and not result.alone
    table = Table("check", "result", "found", *(["ranks"] if several else []))
    for check, severity, what, where in result.rows():
        # A rank other than 0 that stayed alone prints only what is wrong: rank 0 prints the rest.
        if severity != "ok" or not result.rank:
            style = next(_STYLES[s] for s in SEVERITIES if s == severity)
            cells = (Text(check), Text(severity, style), Text(what))
            table.add_row(*cells, *([Text(where)] if several else []))
    console.print(table)
    for finding in sorted(result.findings, key=lambda f: -SEVERITIES.index(f.severity)):
        if finding.severity != "ok":
            for line, style in _lines(result, finding):
                console.print(Text(line, style), soft_wrap=True)
    console.print(summary(result), style=_STYLES[result.worst], markup=False)
    console.file.flush()


def _heading(result: CheckReport) -> str:
    who = "This process" if result.rank is None else f"Rank {result.rank}"
    return f"{who} of {result.world} could not reach the others; what it found by itself:"


def _lines(result: CheckReport, finding: Finding) -> list[tuple[str, str]]:
    where = result.where(finding)
    ranks = f" (ranks: {where})" if where and where != "all" and not result.alone else ""
    lines = [(f"{finding.severity}: {finding.check}: {finding.what}{ranks}", "bold")]
    if finding.why:
        lines.append((f"  why: {finding.why}", ""))
    if finding.advice:
        lines.append((f"  do:  {finding.advice}", ""))
    return lines


def summary(result: CheckReport) -> str:
    """'1 error, 2 warnings, 14 ok'."""
    counts = Counter(finding.severity for finding in result.findings)
    parts = [
        f"{counts['ok']} ok" if severity == "ok" else counted(counts[severity], severity)
        for severity in reversed(SEVERITIES)
        if counts[severity]
    ]
    return ", ".join(parts)
