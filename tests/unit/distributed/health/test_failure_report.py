"""How a rank tells its launcher why it failed: by a pipe, and by torchrun's file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from samestep.distributed.health.failure_report import FailureReport, report_end, report_failure
from samestep.environment.variables import report_pipe, report_variables
from samestep.errors import RankHung


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The ends of a pipe to a launcher."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for name, value in report_variables(writing).items():
        monkeypatch.setenv(name, value)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def received(reading: int) -> list[FailureReport]:
    lines = os.read(reading, 1 << 20).split(b"\n")
    assert lines.pop() == b""
    return [FailureReport.read(line) for line in lines]


def test_a_failure_goes_to_the_launcher_with_its_trace(pipe: tuple[int, int]) -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        report_failure(error)
    report_end()
    failure, end = received(pipe[0])
    assert (failure.kind, failure.message) == ("ValueError", "boom")
    assert "Traceback" in failure.trace
    assert (end.kind, end.time >= failure.time) == ("", True)


def test_a_hang_is_about_the_rank_that_hangs(pipe: tuple[int, int]) -> None:
    report_failure(RankHung("a collective waited", [1, 3]))
    assert received(pipe[0])[0].ranks == (1, 3)


def test_the_longest_message_fits_into_a_pipe_that_nobody_reads(pipe: tuple[int, int]) -> None:
    report_failure(ValueError("é" * 1_000_000))
    report_failure(ValueError("second"))
    (failure,) = received(pipe[0])[:1]
    assert failure.message.startswith("éééé")


def test_a_launcher_that_is_gone_keeps_no_rank_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    for name, value in report_variables(writing).items():
        monkeypatch.setenv(name, value)
    os.close(reading)
    report_failure(ValueError("boom"))
    os.close(writing)


def test_another_file_under_the_pipes_number_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    variables = report_variables(writing)
    assert report_pipe(variables) == writing
    os.close(writing)
    assert report_pipe(variables) is None
    with (tmp_path / "precious").open("wb") as file:
        assert file.fileno() == writing, "the lowest number that is free"
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        report_failure(ValueError("boom"))
    os.close(reading)
    assert (tmp_path / "precious").read_bytes() == b""


def test_a_failure_is_left_for_torchruns_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    report_failure(ValueError("boom"))
    message = json.loads(path.read_text())["message"]
    assert "ValueError: boom" in json.dumps(message)


def test_a_file_that_cannot_be_written_is_no_second_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    report_failure(ValueError("boom"))


def test_without_an_agent_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    report_failure(ValueError("boom"))
    assert list(tmp_path.iterdir()) == []
