"""An exception left where torch's elastic agent looks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samestep.distributed.health.error_file import record_failure


def test_a_failure_is_left_for_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    record_failure(ValueError("boom"))
    message = json.loads(path.read_text())["message"]
    assert "ValueError: boom" in json.dumps(message)


def test_without_an_agent_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    record_failure(ValueError("boom"))
    assert list(tmp_path.iterdir()) == []
