"""A page that stays open in a real browser while a test goes on; over pipes, so that no port is opened."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.browser.browser import browser


class OpenPage:
    """One page of a browser, by Chrome's DevTools protocol.

    Args:
        commands: Where commands are written.
        answers: Where answers are read.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None

    def open(self, address: str) -> None:
        """Open an address in a new tab, and follow that."""
        target = self._call("Target.createTarget", url=address)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    @contextmanager
    def another_tab(self, address: str) -> Iterator[None]:
        """Follow a tab in front of this one, and this one again afterwards."""
        before, self._session = self._session, None
        self.open(address)
        yield
        self._session = before

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression in the page; None while it is loading."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> Any:
        """The value of an expression once it is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if value := self.evaluate(script):
                return value
            time.sleep(0.2)
        raise AssertionError(f"{script} is not true after {seconds} s; the page:\n{self.text()}")

    def text(self) -> str:
        """The page as a person reads it."""
        return str(self.evaluate("document.body.innerText"))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))


@contextmanager
def open_page(address: str, profile: Path, size: tuple[int, int] = (1200, 1000)) -> Iterator[OpenPage]:
    """Yield a page in a browser, which is ended with it.

    Args:
        address: Of the page.
        profile: An empty folder for what the browser writes.
        size: Of its window.
    """
    program = browser()
    for_commands, for_answers = os.pipe(), os.pipe()

    def use_pipes() -> None:
        # The protocol's places are 3 and 4; copied first to where neither overwrites the other.
        copies = os.dup2(for_commands[0], 60), os.dup2(for_answers[1], 61)
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)

    process = subprocess.Popen(
        [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "--remote-debugging-pipe",
        ],
        preexec_fn=use_pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(for_commands[0])
    os.close(for_answers[1])
    page = OpenPage(for_commands[1], for_answers[0])
    try:
        page.open(address)
        yield page
    finally:
        process.terminate()
        process.wait(30)
        os.close(for_commands[1])
        os.close(for_answers[0])
