"""Turns of a comparison, in one process."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.bench import short_runs
from samestep.bench.tuning import timing
from samestep.bench.tuning.timed import Timed
from samestep.bench.tuning.variants import Variant, lane_variants
from samestep.config import Config, load_config
from samestep.config.measuring_run import endless_run
from samestep.distributed.context import SingleProcessContext
from samestep.distributed.logging import KeptLog
from samestep.errors import PlanError
from tests.distributed.running import settings


def measure_lanes(
    config: Config, context: SingleProcessContext, lanes: tuple[int, ...], widths: tuple[int, ...] = (),
    rounds: int = 2, steps: int | None = 2,
) -> list[Timed]:  # fmt: skip
    tried = lane_variants(lanes, widths, 1)
    found = timing.time_variants(config, context, tried, rounds, steps)
    return [Timed.read(row) for row in found.rows]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def config(folder: Path, task: str = "Everything", **values: Any) -> Config:
    return load_config(settings(task, folder / "run", **values))


def test_a_turn_is_the_users_run_without_saves_evaluations_or_an_end(tmp_path: Path) -> None:
    given = config(
        tmp_path, ema={}, swa={}, schedule={}, early_stopping={}, clip={"norm": 1.0},
        trackers={"tensorboard": True}, speed={"graph": True}, loader={"workers": 2},
    )  # fmt: skip
    own = endless_run(given, str(tmp_path / "there"), drop_last=True)
    assert (own.run_path, own.global_batch, own.drop_last) == (tmp_path / "there", 32, True)
    assert own.speed.graph is True
    assert (own.checkpoint.enabled, own.trackers.tensorboard) == (False, False)
    assert (own.schedule, own.swa, own.early_stopping, own.epochs) == (None, None, None, None)
    assert (own.ema, own.clip, own.loader) == (given.ema, given.clip, given.loader)


def test_a_batch_that_the_data_does_not_fill_is_a_row_that_failed(
    tmp_path: Path, context: SingleProcessContext
) -> None:
    tried = [Variant("as configured"), Variant("global batch 4096", ("global_batch=4096",))]
    found = timing.time_variants(config(tmp_path), context, tried, 1, 2)
    own, larger = map(Timed.read, found.rows)
    assert own.seconds
    assert "a step takes global_batch 4096" in larger.failed


def test_every_choice_is_timed_in_every_round_and_nothing_is_left(
    tmp_path: Path, own_temporary_folder: Path, context: SingleProcessContext, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure_lanes(config(tmp_path), context, (1, 4))
    assert [(m.label, m.world, m.lanes, m.global_batch) for m in found] == [("1 lane", 1, 1, 32), ("4 lanes", 1, 4, 32)]
    assert all(len(m.seconds) == 2 and min(m.seconds) > 0 for m in found)
    assert all(m.peak_bytes and (m.failed, m.notes) == ("", ()) for m in found)
    assert not list(own_temporary_folder.glob("samestep*"))
    assert [path.name for path in tmp_path.iterdir()] == ["temporary"]
    assert "Plan" not in capsys.readouterr().err


def test_choices_take_turns_and_data_is_read_once(tmp_path: Path, context: SingleProcessContext) -> None:
    (tmp_path / "counting.py").write_text(
        "from tests.distributed.tasks import Everything\n"
        "from tests.unit.bench.tuning.test_timing import CALLS\n"
        "class Counting(Everything):\n"
        "    def train_data(self):\n"
        "        CALLS.append('data')\n"
        "        return super().train_data()\n"
        "    def model(self):\n"
        "        CALLS.append('model')\n"
        "        return super().model()\n"
        "    def loss(self, model, batch):\n"
        "        CALLS.append(len(batch))\n"
        "        return super().loss(model, batch)\n"
    )
    CALLS.clear()
    given = config(tmp_path, f"{tmp_path}/counting.py:Counting", drop_last=True)
    measure_lanes(given, context, (1, 2, 4), rounds=3)
    counted = Counter(CALLS)
    assert (counted["data"], counted["model"]) == (1, 9), "each turn has a new model"
    starts = [place + 1 for place, call in enumerate(CALLS) if call == "model"]
    assert [CALLS[start] for start in starts] == [32, 16, 8, 16, 8, 32, 8, 32, 16]


CALLS: list[Any] = []


def test_the_number_of_timed_steps_follows_from_the_first_turn(
    tmp_path: Path, context: SingleProcessContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.bench.tuning.timing._SECONDS", 0.0)
    counted: list[int] = []
    timed = timing._seconds_of

    def counting(steps: Any, count: int, device: Any) -> float:
        counted.append(count)
        return timed(steps, count, device)

    monkeypatch.setattr(timing, "_seconds_of", counting)
    measure_lanes(config(tmp_path), context, (1, 2), rounds=1, steps=None)
    assert counted == [2, 5, 2, 5], "two of the warm-up, then as few as are timed at all"


def test_what_does_not_fit_is_left_out(tmp_path: Path, context: SingleProcessContext) -> None:
    given = config(tmp_path, "Cramped", params={"fits": 8})
    large, fits = measure_lanes(given, context, (2, 4))
    assert "memory" in large.failed
    assert (large.seconds, fits.failed, len(fits.seconds)) == ((), "", 2)


def test_batchnorm_over_single_samples_is_left_out(tmp_path: Path, context: SingleProcessContext) -> None:
    large, single = measure_lanes(config(tmp_path), context, (8, 32))
    assert not large.failed
    assert "a lane has 1 sample, and BatchNorm normalises over a lane" in single.failed


def test_streams_are_measured(tmp_path: Path, context: SingleProcessContext) -> None:
    found = measure_lanes(config(tmp_path, "Streamed"), context, (2,))
    assert len(found[0].seconds) == 2


def test_widths_need_graphs(tmp_path: Path, context: SingleProcessContext) -> None:
    context.device = torch.device("cuda:0")  # refused before anything is computed
    given = config(tmp_path, speed={"graph": False})
    with pytest.raises(PlanError, match=r"--parallel is about .* speed\.graph is false"):
        measure_lanes(given, context, (2,), (1, 2))


def test_what_a_run_logs_about_its_speed_is_kept_once(tmp_path: Path, context: SingleProcessContext) -> None:
    (tmp_path / "talking.py").write_text(
        "from tests.distributed.tasks import Everything\n"
        "class Talking(Everything):\n"
        "    def after_update(self, step):\n"
        "        self.log.main('speed.graph: replayed')\n"
        "        self.log.main('something else')\n"
    )
    given = config(tmp_path, f"{tmp_path}/talking.py:Talking")
    with pytest.MonkeyPatch.context() as patch:
        made = short_runs.load_task

        def load(config: Config) -> Any:
            task: Any = made(config)
            kept = KeptLog.__init__

            def remember(log: Any, rank: int, world: int) -> None:
                kept(log, rank, world)
                task.log = log

            patch.setattr(KeptLog, "__init__", remember)
            return task

        patch.setattr(short_runs, "load_task", load)
        (found,) = measure_lanes(given, context, (2,))
    assert found.notes == ("speed.graph: replayed",)
