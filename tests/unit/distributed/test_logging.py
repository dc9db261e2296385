"""The log of a rank: terminal, file, and the standard logger that users can configure."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from samestep.distributed.context import SingleProcessContext
from samestep.distributed.logging import RankLog


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, left as it was."""
    logger = logging.getLogger()
    before = list(logger.handlers)
    yield logger
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)


def lines_of(folder: Path, rank: int = 0) -> list[str]:
    """The lines of a rank's file, without their times."""
    return [line.split(" ", 2)[2] for line in (folder / f"rank-{rank}.log").read_text().splitlines()]


def test_caplog_gets_every_line_with_level_rank_and_place(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RankLog(2, 4)
    log.warn("it is slow")
    log.everyone("100 % done")
    assert caplog.record_tuples == [
        ("samestep", logging.WARNING, "[Rank 2] it is slow"),
        ("samestep", logging.INFO, "[Rank 2] 100 % done"),
    ]
    [first, _] = caplog.records
    assert first.__dict__["rank"] == 2
    assert (first.filename, first.funcName) == (
        "test_logging.py", "test_caplog_gets_every_line_with_level_rank_and_place",
    )  # fmt: skip
    assert capsys.readouterr().err == "[Rank 2] it is slow\n[Rank 2] 100 % done\n"


@pytest.mark.requirement("000-P1-5", "003-T1-4")
def test_a_line_of_the_run_is_shown_by_rank_0_only_and_in_every_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        log = RankLog(rank, 2)
        log.to_file(tmp_path)
        log.main("Plan")
        log.close()
        assert lines_of(tmp_path, rank) == ["Plan"]
    assert capsys.readouterr().err == "[Rank 0] Plan\n"
    assert caplog.messages == ["[Rank 0] Plan"]


def test_two_runs_in_one_process_write_their_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SingleProcessContext() as first, SingleProcessContext() as second:
        first.log_to(tmp_path / "first", append=False)
        second.log_to(tmp_path / "second", append=False)
        first.log.main("of the first")
        second.log.warn("of the second")
    assert lines_of(tmp_path / "first") == ["of the first"]
    assert lines_of(tmp_path / "second") == ["of the second"]
    assert capsys.readouterr().err == "of the first\nof the second\n"


def test_a_root_handler_on_the_terminal_shows_lines_in_our_place(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    root.addHandler(handler)
    log = RankLog(1, 2)
    log.main("not this rank's to show")
    log.everyone("local rank 1")
    assert capsys.readouterr().err == "INFO [Rank 1] local rank 1\n"
    handler.setLevel(logging.WARNING)
    log.everyone("too fine for it")
    assert capsys.readouterr().err == "[Rank 1] too fine for it\n"


def test_a_root_handler_elsewhere_gets_lines_beside_the_terminal(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = io.StringIO()
    root.addHandler(logging.StreamHandler(elsewhere))
    RankLog(0, 1).main("Plan")
    assert elsewhere.getvalue() == capsys.readouterr().err == "Plan\n"


def test_the_level_of_the_logger_holds_for_terminal_and_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.WARNING, logger="samestep")
    log = RankLog(0, 1)
    log.to_file(tmp_path)
    log.main("Plan")
    log.warn("it is slow")
    log.close()
    assert lines_of(tmp_path) == ["it is slow"]
    assert capsys.readouterr().err == "it is slow\n"


def test_a_closed_log_keeps_no_file_and_leaves_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = list(logging.getLogger("samestep").handlers)
    log = RankLog(0, 1)
    log.to_file(tmp_path)
    stream = log.stream
    assert stream is not None
    log.close()
    log.close()
    assert stream.closed
    assert log.stream is None
    log.warn("too late")
    assert lines_of(tmp_path) == []
    assert capsys.readouterr().err == ""
    assert logging.getLogger("samestep").handlers == handlers


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_costs_lines_and_prints_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    log = RankLog(0, 1)
    log.to_file(tmp_path, append=True)
    log.main("a line")
    log.close()
    assert capsys.readouterr().err == "a line\n"


def test_a_terminal_that_takes_no_more_lines_ends_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("/dev/full is Linux's")
    with full.open("w") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        log = RankLog(0, 1)
        log.main("a line")
        log.close()
        monkeypatch.undo()
        with suppress(OSError):
            stream.close()
