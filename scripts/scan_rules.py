"""Write the table of `samestep check`'s rules into docs/scan.md."""

from __future__ import annotations

import re
from pathlib import Path

from samestep.check.code.rules import RULES

PAGE = Path(__file__).parents[1] / "docs" / "scan.md"


def table() -> str:
    """One row for each rule."""
    rows = [
        f"| `{rule.name}` | {rule.effect} | {rule.title}{'; not where a library has the loop' if rule.plain else ''} |"
        for rule in RULES.values()
    ]
    return "\n".join(["| rule | effect | finds |", "|---|---|---|", *rows])


def with_table(text: str) -> str:
    """Return a page with the table between its marks."""
    begin, end = "<!-- rules: begin -->", "<!-- rules: end -->"
    made = f"{begin}\n\n{table()}\n\n{end}"
    return re.sub(f"{begin}.*?{end}", lambda _: made, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
