"""A hook of mkdocs: pages that are not in docs/, and links that leave it.

Recipes and the project's own pages are read where they are. A link to any other file of the repository leads there if
`repo_url` is set, and is plain text otherwise.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = (
    *sorted(ROOT.glob("recipes/*/README.md")),
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")),
)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for page in PAGES:
        files.append(File.generated(config, page.relative_to(ROOT).as_posix(), abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = Path(page.file.abs_src_path)

    def rewritten(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        if picture:
            return match.group()
        found = (source.parent / target).resolve()
        place = _place(found)
        if place is not None:
            here = Path(page.file.src_uri).parent
            return f"[{text}]({Path(os.path.relpath(place, here)).as_posix()}{anchor or ''})"
        if config.repo_url and found.is_relative_to(ROOT):
            return (
                f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{found.relative_to(ROOT).as_posix()}{anchor or ''})"
            )
        return text

    parts = re.split(r"(^```.*?^```\s*?$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if at % 2 else _LINK.sub(rewritten, part) for at, part in enumerate(parts))


def _place(found: Path) -> str | None:
    """Return where a file is on the site; None if it is not there."""
    if found == ROOT / "README.md":
        return "index.md"
    if found in PAGES:
        return found.relative_to(ROOT).as_posix()
    return (
        found.relative_to(ROOT / "docs").as_posix() if found.is_relative_to(ROOT / "docs") and found.is_file() else None
    )
