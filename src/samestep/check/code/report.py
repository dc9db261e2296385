"""Findings in code as text."""

from __future__ import annotations

from collections.abc import Sequence

from samestep.check.code.rule import Rule
from samestep.check.code.rules import RULES
from samestep.check.code.scan import Scan

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
