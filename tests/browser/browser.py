"""A real browser without a window: what a page has become once its scripts ran."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def found_browser() -> str | None:
    """The browser's program; None where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def browser() -> str:
    """The browser's program; the test is skipped where there is none."""
    if found := found_browser():
        return found
    pytest.skip(f"no browser: none of {', '.join(_NAMES)} is on the PATH (tests/browser/install.sh)")


def dom_of(page: Path, profile: Path) -> str:
    """The document after its scripts ran, in a browser that can reach nothing but the file.

    Args:
        page: The file.
        profile: An empty folder for what the browser writes.
    """
    done = subprocess.run(
        [
            browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1200,1000",
            "--virtual-time-budget=8000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer_of(page: Path, script: str, folder: Path) -> Any:
    """What a script returns that uses a page as a person would: the body of an async function.

    Args:
        page: The file; it is not changed.
        script: JavaScript that returns something JSON can hold.
        folder: An empty folder for what the browser writes.
    """
    asked = folder / "asked.html"
    code = f"""<script>(async () => {{
    const answer = document.createElement("pre");
    answer.id = "answer";
    try {{ answer.textContent = JSON.stringify(await (async () => {{ {script} }})()); }}
    catch (error) {{ answer.textContent = JSON.stringify({{ failed: String(error.stack) }}); }}
    document.body.append(answer);
    }})();</script></body>"""
    asked.write_text(page.read_text(encoding="utf-8").replace("</body>", code), encoding="utf-8")
    found = re.search(r'<pre id="answer">(.*?)</pre>', dom_of(asked, folder / "profile"), re.DOTALL)
    assert found is not None, "the page's scripts did not get so far"
    answer = json.loads(html.unescape(found[1]))
    assert not (isinstance(answer, dict) and "failed" in answer), answer
    return answer
