"""Opening a run from a config in any of its forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep.distributed.context import SingleProcessContext
from samestep.errors import ConfigError, RunDirError
from samestep.train import start as start_module
from tests.unit.train.own_loops import settings


def in_file(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.mark.requirement("004-6.1-1")
@pytest.mark.parametrize("form", ["mapping", "path", "text", "config"])
def test_a_config_is_taken_in_any_form(tmp_path: Path, form: str) -> None:
    values = settings(tmp_path / "run", seed=5)
    file = in_file(tmp_path / "config.json", values)
    given: dict[str, Any] = {"mapping": values, "path": file, "text": str(file), "config": samestep.load_config(values)}
    with samestep.start(given[form]) as run:
        assert (run.config.seed, run.run_dir) == (5, tmp_path / "run")
        assert (run.context.rank, run.context.world) == (0, 1)
        assert run.batch.lane_batch == 2


def test_a_config_with_mistakes_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="epoch"):
        samestep.start({**settings(tmp_path / "run"), "epoch": 3})
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_opened_leaves_no_context_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Context(SingleProcessContext):
        def close(self) -> None:
            closed.append(1)
            super().close()

    monkeypatch.setattr(start_module, "create_run_context", lambda config, hardware: Context())
    with samestep.start(settings(tmp_path)):
        with pytest.raises(RunDirError, match="is in use by process"):
            samestep.start(settings(tmp_path))
        assert closed == [1]
    assert closed == [1, 1]
