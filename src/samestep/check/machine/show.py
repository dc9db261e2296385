"""A report for people, or as one line of JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter

from samestep.check.machine.findings import SEVERITIES, CheckReport, Finding, Severity
from samestep.words import counted

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
