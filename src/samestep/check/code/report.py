"""Findings as text, and as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from samestep.check.code.rule import Finding, Rule
from samestep.check.code.rules import RULES
from samestep.check.code.scan import Scan
from samestep.report.page import write_page
from samestep.report.table import Cell, code, html_table

COLUMNS = ("rule", "found", "on several ranks it", "what it is")


def summary(found: Scan) -> str:
    """One line about everything."""
    count = len(found.findings)
    places = "nothing" if count == 0 else "1 place" if count == 1 else f"{count} places"
    files = "1 file" if found.files == 1 else f"{found.files} files"
    more = f", {found.silenced} silenced" if found.silenced else ""
    left = f", {len(found.skipped)} could not be read" if found.skipped else ""
    return f"{places} in {files}{more}{left}"


def rows(found: Scan) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table by rules, the most frequent first."""
    return [
        (name, str(count), RULES[name].effect, RULES[name].title.replace("`", ""))
        for name, count in found.by_rule.items()
    ]


def lines(found: Scan) -> list[str]:
    """Return every place, with its line; and under the first of each rule why, and what to write."""
    explained: set[str] = set()
    shown: list[str] = []
    for finding in found.findings:
        shown.append(f"{finding.place}: {finding.rule}: {finding.title}")
        shown.append(f"    {finding.code}")
        if finding.rule not in explained:
            explained.add(finding.rule)
            shown += [f"  why: {finding.why}", f"  write: {finding.instead}"]
    return shown


def rule_rows(rules: Sequence[Rule]) -> list[tuple[str, str, str, str]]:
    """Return all rules, for `--list`."""
    return [(rule.name, rule.effect, rule.title, rule.instead) for rule in rules]


def write_report(found: Scan, title: str, path: Path) -> None:
    """Write a page with the table by rules, and every place under its rule."""
    lines = [
        [Cell(f'<a href="#{name}"><code>{name}</code></a>'), str(count), effect, what]
        for name, count, effect, what in rows(found)
    ]
    parts = "\n".join(_section(RULES[name], found.findings) for name in found.by_rule)
    skipped = "".join(
        f"<li><code>{html.escape(file)}</code> {html.escape(why)}</li>" for file, why in found.skipped.items()
    )
    unread = f"<h2>Not read</h2><ul>{skipped}</ul>" if skipped else ""
    body = f"""<h1>{html.escape(title)}: what is different on several ranks</h1>
<p>{html.escape(summary(found))}. Nothing was imported or run; a line that is right as it is gets the comment
<code># samestep: ok</code>.</p>
{html_table(COLUMNS, lines, numbers=COLUMNS[1:2])}
{parts}
{unread}"""
    write_page(path, f"samestep check: {title}", body)


def _section(rule: Rule, findings: Sequence[Finding]) -> str:
    places = [(one.place, code(one.code)) for one in findings if one.rule == rule.name]
    return f"""<h2 id="{rule.name}"><code>{rule.name}</code>: {_marked(rule.title)}</h2>
<p>Why: {_marked(rule.why)}.</p><p>Write: {_marked(rule.instead)}.</p>
{html_table((), places, kind="facts")}"""


def _marked(text: str) -> str:
    """Text whose backquotes become code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if at % 2 else part for at, part in enumerate(parts))
