"""The live view in a real browser, with a run that is killed and resumed while its page is open."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from tests.browser.browser import browser
from tests.browser.open_page import open_page
from tests.cli.processes import samestep, started, wait_for, write_config
from tests.cli.test_ui import ui

pytestmark = pytest.mark.browser

_STEP = "(document.querySelector('#part-state')?.innerText.match(/step\\s+([0-9,]+)/) || [0, 0])[1]"


def test_a_run_is_followed_through_a_kill_and_a_resume(tmp_path: Path) -> None:
    browser()
    params = {"seconds": 0.1, "hurry": str(tmp_path / "hurry")}
    values = {"checkpoint": {"every_steps": 5}, "distributed": {"timeout": 60}}
    config = write_config(tmp_path / "slow.yaml", "Slow", steps=200, log_every=1, params=params, **values)
    with started("launch", config, "--nproc", "2", cwd=tmp_path) as process:
        run = tmp_path / "runs" / "slow"
        wait_for((run / "metrics.jsonl").exists)
        with ui(tmp_path) as reader, open_page(f"{reader.address}?{reader.query}", tmp_path / "profile") as page:
            page.until("document.querySelector('#part-runs a')?.textContent === 'runs/slow'")
            page.evaluate("document.querySelector('#part-runs a').click()")
            page.until(f"Number({_STEP}) > 8")
            page.evaluate("window.stayed = true")
            page.until("document.querySelector('#connection').textContent === 'live'")
            page.until("document.querySelectorAll('#part-ranks .lane-boxes i').length === 8")
            before = page.evaluate(f"Number({_STEP})")
            page.until(f"Number({_STEP}) > {before}")
            os.kill(int(re.findall(r"\d+", (run / "run.lock").read_text())[0]), signal.SIGKILL)  # rank 0
            page.until("/killed|failed/.test(document.querySelector('#part-state').innerText)")
            assert "samestep resume runs/slow" in page.text()
            process.wait(60)
            (tmp_path / "hurry").touch()
            done = samestep("train", config, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            page.until("document.querySelector('#part-state').innerText.includes('finished')")
            assert page.until(
                "document.querySelector('#part-state').innerText.match(/2 from step 0, then 1 from step/)"
            )
            page.until(
                "[...document.querySelectorAll('figure.chart title')].some((t) => t.textContent.includes('resumed on 1 rank'))"
            )
            assert page.evaluate("window.stayed"), "the page was loaded again"
            with contextlib.ExitStack() as tabs:  # more than a browser has connections to one server
                for _ in range(8):
                    tabs.enter_context(page.another_tab(f"{reader.address}run?path=runs/slow"))
                    page.until("document.querySelector('#part-state')?.innerText.includes('finished')")


def test_runs_are_filtered_sorted_and_compared(tmp_path: Path) -> None:
    browser()
    config = write_config(tmp_path / "small.yaml", steps=4, log_every=1)
    for name, steps in (("first", 4), ("second", 3), ("third", 2)):
        assert samestep("train", config, f"name={name}", f"steps={steps}", cwd=tmp_path).returncode == 0
    with ui(tmp_path) as reader, open_page(f"{reader.address}?{reader.query}", tmp_path / "profile") as page:
        shown = "[...document.querySelectorAll('#part-runs tbody tr')].filter((r) => !r.hidden).map((r) => r.cells[1].innerText).join()"
        page.until(f"{shown} === 'runs/third,runs/second,runs/first'")  # the newest first
        page.evaluate("[...document.querySelectorAll('th')].find((h) => h.textContent === 'run').click()")
        page.until(f"{shown} === 'runs/first,runs/second,runs/third'")
        page.evaluate(
            "(() => { const f = document.querySelector('.tools input'); f.value = 'ir'; f.dispatchEvent(new Event('input')); })()"
        )
        page.until(f"{shown} === 'runs/first,runs/third'")
        assert page.evaluate("document.querySelector('#compare').disabled")
        page.evaluate("document.querySelectorAll('#part-runs tr:not([hidden]) input.choose').forEach((b) => b.click())")
        page.evaluate("document.querySelector('#compare').click()")
        page.until("document.querySelector('h1')?.textContent === 'first, third'")
        page.until("document.querySelectorAll('figure.chart .legend button').length === 2")
        page.until("document.querySelector('#part-configs')?.innerText.includes('steps')")
        page.evaluate(
            "(() => { const s = document.querySelector('figure select'); s.value = 'seconds'; s.dispatchEvent(new Event('change')); })()"
        )
        page.until("document.querySelector('figure svg').textContent.includes('seconds')")
