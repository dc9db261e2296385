"""Self-contained HTML pages: one style, nothing from the network, and what they are evidence of."""

from __future__ import annotations

import html
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from samestep.config.secrets import without_passwords
from samestep.errors import OutputError, TextError
from samestep.parsing.files import read_text
from samestep.report.table import html_table
from samestep.version import __version__

_GENERATOR = '<meta name="generator" content="samestep">'
"""By which we know a page of ours."""

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What a browser lets a page do: nothing that needs a network, whatever is on it."""

_LIVE = f"{_POLICY}; connect-src 'self'; form-action 'self'"
"""What a page of `samestep ui` may do: also read from the server that it came from."""

_DIGITS = 12
"""Characters of a commit's name."""

_STYLE = files("samestep.report").joinpath("page.css").read_text(encoding="utf-8")


def write_page(path: Path, title: str, body: str, facts: Mapping[str, str] | None = None, force: bool = False) -> None:
    """Write a page; one that we have written before is replaced.

    Args:
        force: whether any other file is replaced, too.

    Raises:
        OutputError: if another file is there.
    """
    if not force:
        refuse_other_file(path)
    write_document(path, page(title, body, facts))


def write_document(path: Path, text: str) -> None:
    """Write a page as `page` returns it; an `OutputError` if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None


def refuse_other_file(path: Path, advice: str = "name another file") -> None:
    """Refuse to replace what is no page of ours; before the work of a command, not after it."""
    try:
        with path.open("rb") as file:
            ours = _GENERATOR.encode() in file.read(1000)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from None
    if not ours:
        raise OutputError(f"{path} exists already, and is no page of samestep: {advice}")


def page(title: str, body: str, facts: Mapping[str, str] | None = None, live: bool = False) -> str:
    """Return a complete HTML document that loads nothing from the network.

    Args:
        title: plain text; it is escaped.
        body: HTML.
        facts: where the numbers come from, by name; plain text. The date and the versions that
            wrote the page are added.
        live: whether it may read from the server that it came from.
    """
    policy = _LIVE if live else _POLICY
    origin = html_table((), list({**(facts or {}), **_written_by()}.items()))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">{_GENERATOR}
<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{html.escape(title)}</title>
<style>{_STYLE}</style></head><body>
{body}
<footer>{origin}</footer>
</body></html>
"""


def _written_by() -> dict[str, str]:
    try:
        torch = version("torch")  # without importing it
    except PackageNotFoundError:  # on the path, but not installed
        torch = "unknown"
    versions = f"samestep {__version__}, torch {torch}, Python {platform.python_version()}"
    command, commit = _command(sys.argv), _commit(Path.cwd())
    return {
        **({"command": command} if command else {}),
        **({"commit": commit} if commit else {}),
        "page written": f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} on {platform.node()}",
        "with": f"{versions} on {platform.system()} {platform.machine()}",
    }


def _command(words: Sequence[str]) -> str:
    """Return the command of ours that runs, as others may read it; empty in other programs."""
    name = Path(words[0]).name if words else ""
    if name not in ("samestep", "__main__.py"):
        return ""
    shown = [word.partition("=")[0] + "=..." if word.startswith("launch.environment") else word for word in words[1:]]
    return without_passwords(shlex.join(["samestep", *shown]))


def _commit(folder: Path) -> str:
    """Return the commit that is checked out where the command runs; empty if there is none."""
    for above in (folder, *folder.parents):
        git = above / ".git"
        if git.is_dir():
            try:
                head = read_text(git / "HEAD").strip()
                branch = head.removeprefix("ref: ")
                return (read_text(git / branch).strip() if branch != head else head)[:_DIGITS]
            except TextError:  # such as a branch that is packed
                return ""
    return ""
