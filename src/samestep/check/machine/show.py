"""An examination for people, or as one line of JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter

from samestep.check.machine.findings import SEVERITIES, Examination, Finding, Severity
from samestep.words import counted

_STYLES: dict[Severity, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}


def print_examination(examination: Examination, as_json: bool = False) -> None:
    """Print it all, and flush: a launcher may end this process any time now."""
    if as_json:
        print(json.dumps(examination.as_json()), flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 140)
    if examination.alone and examination.world > 1:
        console.print(_heading(examination), style="bold", markup=False)
    several = examination.world > 1 and not examination.alone
    table = Table("check", "result", "found", *(["ranks"] if several else []))
    for check, severity, what, where in examination.rows():
        # A rank other than 0 that stayed alone prints only what is wrong: rank 0 prints the rest.
        if severity != "ok" or not examination.rank:
            style = next(_STYLES[s] for s in SEVERITIES if s == severity)
            cells = (Text(check), Text(severity, style), Text(what))
            table.add_row(*cells, *([Text(where)] if several else []))
    console.print(table)
    for finding in sorted(examination.findings, key=lambda f: -SEVERITIES.index(f.severity)):
        if finding.severity != "ok":
            for line, style in _lines(examination, finding):
                console.print(Text(line, style), soft_wrap=True)
    console.print(summary(examination), style=_STYLES[examination.worst], markup=False)
    console.file.flush()


def _heading(examination: Examination) -> str:
    who = "This process" if examination.rank is None else f"Rank {examination.rank}"
    return f"{who} of {examination.world} could not reach the others; what it found by itself:"


def _lines(examination: Examination, finding: Finding) -> list[tuple[str, str]]:
    where = examination.where(finding)
    ranks = f" (ranks: {where})" if where and where != "all" and not examination.alone else ""
    lines = [(f"{finding.severity}: {finding.check}: {finding.what}{ranks}", "bold")]
    if finding.why:
        lines.append((f"  why: {finding.why}", ""))
    if finding.advice:
        lines.append((f"  do:  {finding.advice}", ""))
    return lines


def summary(examination: Examination) -> str:
    """'1 error, 2 warnings, 14 ok'."""
    counts = Counter(finding.severity for finding in examination.findings)
    parts = [
        f"{counts['ok']} ok" if severity == "ok" else counted(counts[severity], severity)
        for severity in reversed(SEVERITIES)
        if counts[severity]
    ]
    return ", ".join(parts)
