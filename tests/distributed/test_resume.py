"""A run that is interrupted and is resumed at another size ends with the untouched run's bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.manifest import MODEL, verify_checkpoint
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import EACH_EPOCH, losses_of, train
from tests.variations import variations

CASES: dict[str, dict[str, Any]] = {
    "batchnorm, dropout, augmentation, tail, clipping, adam": {"clip": {"norm": 0.5}, "evaluation": EACH_EPOCH},
    "momentum": {"params": {"optimizer": "momentum"}},
    "two optimizers and a loss with weights": {"task": "TwoOptimizers"},
    "tied, frozen and uncalled parameters": {"task": "Tokens"},
    "bf16": {"precision": "bf16"},
    "iterable data, read again": {"task": "Streamed"},
    "iterable data that says its state": {"task": "StatefulStreamed"},
    "iterable data in two workers": {"task": "StatefulStreamed", "loader": {"workers": 2}},
    "hugging face iterable data": {"task": "HuggingFace"},
    "plain DDP sums": {"same": "rounding", "worlds": (2, 2, 2)},
}
IN_CI = ("batchnorm, dropout, augmentation, tail, clipping, adam",)


@pytest.mark.requirement("000-P4-10", "000-G-4")
@pytest.mark.parametrize("case", variations(CASES, kept=IN_CI))
def test_a_run_goes_on_at_other_sizes_with_the_same_bits(case: str, tmp_path: Path) -> None:
    """Stopped in the middle of the first epoch on 4 ranks, of the second on 1, ended on 2."""
    values = {"checkpoint": {"every_steps": 2}, "epochs": 3, **CASES[case]}
    first, second, last = values.pop("worlds", (4, 1, 2))
    untouched = train(tmp_path, last, **values)
    folder = tmp_path / "run"
    go_on(folder, first, at=1, rank=first - 1, how="SIGTERM", **values)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000002"]
    said = go_on(folder, second, at=5, how="raises", **values)
    assert "on purpose" in said[0][1]
    ended = finish(folder, last, **values)
    assert ended.record.state_hash == untouched.record.state_hash
    assert losses_of(folder) == untouched.record.losses
    assert ended.record.samples == untouched.record.samples[ended.record.start :]
    assert len(set(ended.record.rank_hashes)) == 1


@pytest.mark.requirement("000-P4-6")
@pytest.mark.parametrize("how", variations(["kill -9", "raises"], kept=["kill -9"]))
def test_a_lost_rank_ends_all_and_the_run_goes_on(how: str, tmp_path: Path) -> None:
    # With 67 samples the third step leaves ranks without any, which call in another order.
    values = {"checkpoint": {"every_steps": 1}, "params": {"samples": 67}}
    untouched = train(tmp_path, 1, **values)
    folder = tmp_path / "run"
    said = go_on(folder, 3, at=3, rank=1, how=how, **values)
    assert not any(ok for ok, _ in said)
    blamed = "rank 1 on " if how == "kill -9" else "failed first: ZeroDivisionError"
    for rank in (0, 2):
        # A rank whose main thread is blocked in the backend is ended, and says why in its log.
        log = (folder / "logs" / f"rank-{rank}.log").read_text()
        assert blamed in said[rank][1] + log
    assert finish(folder, 2, **values).record.state_hash == untouched.record.state_hash


def test_the_count_to_early_stopping_goes_on(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "epochs": 50, "best": {"min_delta": 100.0}, "early_stopping": {"patience": 3},
        "evaluation": EACH_EPOCH,
    }  # fmt: skip
    folder = tmp_path / "run"
    go_on(folder, 1, at=7, how="SIGTERM", **values)
    assert finish(folder, 2, **values).record.start == 8
    assert len(losses_of(folder)) == 12


@pytest.mark.requirement("003-R-3")
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    values = {"checkpoint": {"every_steps": 1, "keep_last": 3}}
    folder = tmp_path / "run"
    go_on(folder, 1, at=3, how="SIGTERM", **values)
    path = folder / "checkpoints" / "step-00000004" / MODEL
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    finish(folder, 1, **values)
    log = (folder / "logs" / "rank-0.log").read_text()
    assert "step-00000003: step 3" in log
    verify_checkpoint(folder / "checkpoints" / "step-00000004")


def test_another_config_is_refused_by_each_difference(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go_on(folder, 2, at=3, how="SIGTERM")
    said = go_on(folder, 2, seed=3, lanes=4, global_batch=16, params={"samples": 80})
    text = said[0][1]
    for words in (
        "seed was 0, is 3", "lanes was 8, is 4", "global_batch was 32, is 16", "params was",
        "resume.allow=[params, seed, global_batch, lanes]", "resume=never",
    ):  # fmt: skip
        assert words in text
    assert "failed first: CheckpointError" in said[1][1]
    longer = go_on(folder, 1, epochs=3)
    assert "epochs was 2, is 3" in longer[0][1]
    longer_run = finish(folder, 1, epochs=3, resume={"allow": ["epochs"]}).record
    assert (longer_run.start, longer_run.steps) == (4, 9)


def test_a_model_of_another_shape_is_refused_by_each_tensor(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    go_on(folder, 1, at=3, how="SIGTERM")
    said = go_on(folder, 1, "Wider", resume={"allow": ["task"]})
    assert "hidden.weight is (32, 216) float32, in the checkpoint (24, 216) float32" in said[0][1]
    assert "extra.weight is not in the checkpoint" in said[0][1]


def test_never_sets_the_run_aside_and_a_path_starts_a_branch(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    untouched = finish(folder, 1, checkpoint={"every_steps": 2, "keep_last": 9})
    anew = finish(folder, 1, resume="never")
    assert anew.record.steps == 6
    kept = folder / "earlier" / "1" / "checkpoints" / "step-00000002"
    branch = tmp_path / "branch"
    go_on(branch, 2, at=3, how="SIGTERM", resume=str(kept))
    ended = finish(branch, 1, resume=str(kept))
    assert ended.record.start == 4, "an interrupted branch resumes from its own checkpoint"
    assert ended.record.state_hash == untouched.record.state_hash
    said = go_on(tmp_path / "x", 1, resume=str(tmp_path / "nowhere"))
    assert "is not a valid checkpoint" in said[0][1]
    shutil.rmtree(branch)
    whole = finish(branch, 1, resume=str(folder)).record
    assert whole.start == 6, "a run directory will do"
