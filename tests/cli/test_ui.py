"""The live view's server in a real process: what it shows, and to whom."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import samestep, started, write_config
from tests.cli.tiny_sweep import write_sweep

pytest.importorskip("uvicorn", reason="the extra `ui` is not installed")

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them stopped and resumed on two ranks, and a verification."""
    folder = tmp_path_factory.mktemp("ui")
    evaluation = {"every_epochs": None, "every_steps": 3}
    config = write_config(folder / "small.yaml", steps=6, log_every=2, evaluation=evaluation)
    for words in (
        ("train", config, "name=a", "--stop-after", "4"),
        ("launch", config, "--nproc", "2", "name=a"),
        ("train", config, "name=b", "seed=7"),
        ("verify", config, "--worlds", "1,2", "--steps", "2", "name=proved"),
    ):
        done = samestep(*words, cwd=folder)
        assert done.returncode in (0, 75), done.stderr
    return folder


class Reader:
    """Someone with a browser's cookies."""

    def __init__(self, address: str) -> None:
        self.address, _, self.query = address.partition("?")
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def get(self, path: str = "", **headers: str) -> str:
        with self._opener.open(urllib.request.Request(self.address + path, headers=headers), timeout=30) as answer:
            return str(answer.read().decode())

    def refused(self, path: str = "", **headers: str) -> int:
        with pytest.raises(urllib.error.HTTPError) as error:
            self.get(path, **headers)
        return error.value.code

    def open(self, path: str) -> Any:
        return self._opener.open(self.address + path, timeout=30)

    def first_event(self, page: str) -> dict[str, Any]:
        with self.open("events?" + urllib.parse.urlencode({"page": page})) as answer:
            line = answer.readline().decode()
        assert line.startswith("data: ")
        return dict(json.loads(line[6:]))


@contextmanager
def ui(folder: Path, *words: str) -> Iterator[Reader]:
    """The server, and someone who was given its address."""
    with started("ui", *words, cwd=folder) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line)
        assert found is not None, line
        yield Reader(found[0])


def test_every_page_shows_what_the_folder_holds(folder: Path) -> None:
    with ui(folder) as reader:
        runs = reader.get("?" + reader.query)
        assert "runs/a" in runs
        assert "1 → 2" in runs  # its world sizes
        assert "token=" not in runs  # the address of a page can be passed on
        run = reader.get("run?path=runs/a")
        for words in (
            "finished",
            "6 of 6",
            "1 from step 0, then 2 from step 4",
            "Checkpoints",
            "valid",
            "Log of rank 0",
        ):
            assert words in run, words
        assert "samestep launch" in run  # what started it
        assert "resumed on 2 ranks" in run  # a mark on the curves
        compared = reader.get("compare?path=runs/a&path=runs/b")
        assert "where they differ" in compared
        assert "seed" in compared
        proofs = reader.get("proofs")
        assert "kept" in proofs
        assert re.search("<code>[0-9a-f]{16}</code>", proofs)
        assert "no sweeps" in reader.get("sweeps")
        event = reader.first_event("run?path=runs/a")
        assert "6 of 6" in event["parts"]["state"]
        assert event["panels"][0]["title"] == "loss"


def test_only_who_has_the_token_reads_and_nothing_else_is_served(folder: Path, tmp_path: Path) -> None:
    with ui(folder) as reader:
        stranger = Reader(reader.address)
        assert stranger.refused() == 403
        assert stranger.refused("events?page=") == 403
        assert stranger.refused("?token=" + "x" * 32) == 403
        assert stranger.refused("share?page=") == 403
        assert reader.refused("?" + reader.query, Host="evil.example") == 400  # a name that leads to loopback
        reader.get("?" + reader.query)
        for path in (
            f"run?path={folder}/runs/a",
            "run?path=../../etc",
            "run?path=runs/../runs/a",
            "sweep?path=runs/a",
            "etc",
        ):
            assert reader.refused(path) == 404, path
        request = urllib.request.Request(reader.address, method="POST")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request, timeout=30)


def test_texts_of_a_run_are_texts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    run = tmp_path / "runs" / "evil<b>"
    run.mkdir()
    result = {
        "status": "failed", "reason": EVIL, "steps": 1, "seconds": 1.0, "world": 1, "loss": None, "metrics": {},
        "best": {"metric": EVIL, "value": 1, "step": 1}, "checkpoints": {},
    }  # fmt: skip
    (run / "result.json").write_text(json.dumps(result))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "loss": 1.0, EVIL: 2.0}) + "\n")
    (run / "config.json").write_text(json.dumps({EVIL: EVIL}))
    (run / "ranks.json").write_text(
        json.dumps({"ranks": [{"rank": EVIL, "lanes": [EVIL], "beat": "x", "phase": EVIL}]})
    )
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").write_text(EVIL)
    done = samestep("ui", "--share", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    assert "<img" not in text
    assert "&lt;img src=x" in text


def test_a_sweep_shows_its_trials_and_folds(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra `sweeps` is not installed")
    sweep = write_sweep(tmp_path, folds={"k": 2})
    done = samestep("sweep", "run", sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with ui(tmp_path) as reader:
        runs = reader.get("?" + reader.query)
        assert "no runs here yet" in runs  # those of trials are not single runs
        assert "sweeps/tiny" in reader.get("sweeps")
        page = reader.get("sweep?path=sweeps/tiny")
        assert page.count("★") == 1
        assert page.count("2 of 2") == 2  # folds of each of two trials
        assert page.count('class="spark"') == 4
        fold = re.search(r'href="(run\?path=[^"]+)"', page)
        assert fold is not None
        assert "finished" in reader.get(fold[1])


def test_damaged_files_of_a_run_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    result = {
        "status": "running", "reason": None, "steps": 0, "seconds": 1.0, "world": 1, "loss": None, "metrics": {},
        "best": None, "checkpoints": {},
    }  # fmt: skip
    for number, starts in enumerate(([1], "x", [{"step": "a"}], None)):
        run = tmp_path / "runs" / f"odd-{number}"
        (run / "verify").mkdir(parents=True)
        (run / "result.json").write_text(json.dumps(result))
        (run / "ranks.json").write_text(json.dumps({"starts": starts, "ranks": starts}))
        (run / "origin.json").write_text(json.dumps({"command": {"verb": "train", "overrides": starts}}))
        # Rows longer than what is read at first; and what is no number.
        row = {"step": 41, "loss": 0.5, "epoch": float("nan"), **{f"class-{n}": 1.0 for n in range(200)}}
        (run / "metrics.jsonl").write_text((json.dumps(row) + "\n") * 3)
        proof = {"worlds": {"1": {"steps": 1}, "2": None}, "time": ["x", 1e30, None, 1][number]}
        (run / "verify" / "verification.json").write_text(json.dumps(proof))
    bad = tmp_path / "runs" / os.fsdecode(b"not-\xff-utf8")
    bad.mkdir()
    (bad / "result.json").write_text("{")
    done = samestep("ui", "--share", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert page.count("odd-0") > 1
    assert ">42<" in page, "the step of the last row"
    assert "not-?-utf8" in page
    assert "unreadable" in page


def test_a_folder_in_one_file(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = samestep("ui", "--share", page, cwd=folder)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "EventSource" not in text
    assert text.count('<figure class="chart') == 2  # the curves of both runs
    assert 'href="#page-' in text  # from the list to each of them
    mine = tmp_path / "mine.html"
    mine.write_text("my own")
    done = samestep("ui", "--share", mine, cwd=folder)
    assert done.returncode != 0
    assert mine.read_text() == "my own"
    assert "compare" not in text  # there is no server to ask


def test_an_interrupt_ends_it_with_a_page_open(folder: Path) -> None:
    with started("ui", cwd=folder) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        reader = Reader(found[0])
        reader.get("?" + reader.query)
        with reader.open("events?page=") as stream:
            stream.readline()
            process.send_signal(signal.SIGINT)
            process.wait(30)
        said = process.stdout.read()
    assert "Traceback" not in said, said
    assert "Error" not in said, said


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path) -> None:
    done = samestep("ui", cwd=tmp_path)
    assert done.returncode == 2 or "no folder runs" in done.stderr
    assert "Traceback" not in done.stderr
    with ui(folder) as reader:
        port = re.search(r":(\d+)/", reader.address)
        assert port is not None
        done = samestep("ui", "--port", port[1], cwd=folder)
    assert done.returncode != 0
    assert f"port {port[1]} of 127.0.0.1" in done.stderr
