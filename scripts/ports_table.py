"""Counts what the ports of examples/ports change, proves that they are one run, and writes table and diffs.

python scripts/ports_table.py        # into docs/coming-from.md; a few minutes

A changed line is one that was added or removed, as in a diff; one that was altered is both. Blank lines
and comments do not count.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORTS = ROOT / "examples" / "ports"
PAGE = ROOT / "docs" / "coming-from.md"
BEGIN, END = "<!-- ports_table: begin -->\n", "<!-- ports_table: end -->\n"
DIFF = re.compile(r"(<!-- diff (\w+): (\w+) -> (\w+) -->\n```diff\n).*?(```\n)", re.DOTALL)
NAMES = ("mnist", "vae", "gan", "gpt", "token_classifier")
WORLDS = "1,2,4"


@dataclass(frozen=True)
class Changes:
    """The lines of a port that the single-device script has not, and the other way around."""

    added: int
    removed: int

    def __str__(self) -> str:
        return f"{self.added + self.removed} (+{self.added} -{self.removed})"


def script(name: str, kind: str) -> Path:
    """Return a script's file.

    Args:
        name: The script's folder.
        kind: "single", "samestep" or "accelerate".
    """
    return PORTS / name / ("single.py" if kind == "single" else f"{kind}_port.py")


def code_lines(file: Path) -> list[str]:
    """Return the lines that count."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def changes(name: str, port: str) -> Changes:
    """Return what a port changes.

    Args:
        name: The script's folder.
        port: "samestep" or "accelerate".
    """
    single, ported = code_lines(script(name, "single")), code_lines(script(name, port))
    blocks = difflib.SequenceMatcher(None, single, ported, autojunk=False).get_matching_blocks()
    same = sum(block.size for block in blocks)
    return Changes(added=len(ported) - same, removed=len(single) - same)


def table(identical: Mapping[str, bool]) -> str:
    """Return the table as the page has it.

    Args:
        identical: By script, whether its port is the same run at all sizes.
    """
    rows = [
        f"| script | changed lines with samestep | with Accelerate | identical at W = {WORLDS} |",
        "|---|---|---|---|",
    ]
    for name in NAMES:
        numbers = f"{changes(name, 'samestep')} | {changes(name, 'accelerate')}"
        proven = "yes" if identical[name] else "NO"
        rows.append(f"| [{name}](../examples/ports/{name}) | {numbers} | {proven} |")
    return "\n".join(rows) + "\n"


def diff(name: str, old: str, new: str) -> str:
    """Return the difference of two of a script's files, as `patch` reads it."""
    files = [script(name, kind) for kind in (old, new)]
    texts = [file.read_text(encoding="utf-8").splitlines(keepends=True) for file in files]
    return "".join(difflib.unified_diff(*texts, *(file.name for file in files), n=1))


def with_diffs(page: str) -> str:
    """Return the page with the diffs that it names."""
    return DIFF.sub(lambda found: f"{found[1]}{diff(*found.group(2, 3, 4))}{found[5]}", page)


def with_table(page: str, made: str) -> str:
    """Return the page with another table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def is_identical(name: str) -> bool:
    """Return whether `samestep verify` finds one run at all sizes."""
    port = str(script(name, "samestep"))
    words = [sys.executable, "-m", "samestep", "verify", port, "--worlds", WORLDS]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(words, cwd=folder, check=False).returncode == 0


def main() -> None:
    made = table({name: is_identical(name) for name in NAMES})
    page = with_table(PAGE.read_text(encoding="utf-8"), made)
    PAGE.write_text(with_diffs(page), encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
