"""Which checkpoint a run resumes from, and which configs are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from samestep.checkpoint.manifest import MODEL, TRAINING, Best, folder_name
from samestep.checkpoint.resume import ResumePoint, find_resume_point, refuse_another_run, warn_of_other_bits
from samestep.config import Config, load_config
from samestep.errors import CheckpointError
from tests.unit.checkpoint.checkpoints import flipped, manifest, put

GOOD = {"task": "task.py:Good", "epochs": 3, "global_batch": 8, "params": {"width": 4}}


PLAN = {"global_batch": 8, "lanes": 8, "samples": 100}


def config(*overrides: str) -> Config:
    return load_config(GOOD, overrides)


def point(folder: Path = Path("step-00000004"), saved: Config | None = None) -> ResumePoint:
    document = (saved or config()).model_dump(mode="json")
    return ResumePoint(folder, manifest(config=document, plan=PLAN))


DIFFERENCES = [
    ("seed=1", {}, "seed was 0, is 1"),
    ("epochs=4", {}, "epochs was 3, is 4"),
    ("task=task.py:Other", {}, "task was task.py:Good, is task.py:Other"),
    ("params.width=5", {}, "params was {'width': 4}, is {'width': 5}"),
    ("same=rounding", {}, "same was bits, is rounding"),
    ("drop_last=true", {}, "drop_last was False, is True"),
    ("batchnorm=global", {}, "batchnorm was lane, is global"),
    ("precision=bf16", {}, "precision was fp32, is bf16"),
    ("clip.norm=1.0", {}, "clip.norm was not set, is 1.0"),
    ("refit=true", {}, "refit was False, is True"),
    ("on_nonfinite=skip", {}, "on_nonfinite was stop, is skip"),
    ("steps_per_epoch=9", {}, "steps_per_epoch was not set, is 9"),
    (None, {"global_batch": 16}, "global_batch was 8, is 16"),
    (None, {"lanes": 4}, "lanes was 8, is 4"),
    (None, {"samples": 101}, "samples was 100, is 101"),
]


@pytest.mark.parametrize(("override", "plan", "words"), DIFFERENCES, ids=[d[2] for d in DIFFERENCES])
def test_a_config_of_another_run_is_refused_unless_allowed(
    override: str | None, plan: dict[str, int], words: str
) -> None:
    changes = [] if override is None else [override]
    with pytest.raises(CheckpointError) as caught:
        refuse_another_run(config(*changes), {**PLAN, **plan}, point())
    key = words.split(" ")[0].split(".")[0]
    assert f"\n  - {words}\n" in str(caught.value)
    assert str(caught.value).count("\n  - ") == 1
    assert f"resume.allow=[{key}]" in str(caught.value)
    refuse_another_run(config(*changes, f"resume.allow=[{key}]"), {**PLAN, **plan}, point())


def test_every_difference_is_named_and_the_allowed_ones_are_not() -> None:
    now = config("seed=1", "clip.norm=2", "precision=bf16", "resume.allow=[clip]")
    with pytest.raises(CheckpointError) as caught:
        refuse_another_run(now, {**PLAN, "lanes": 4}, point(Path("runs/a/step-00000004")))
    text = str(caught.value)
    assert text.startswith("runs/a/step-00000004 was written by another run")
    assert [line for line in text.splitlines() if line.startswith("  - ")] == [
        "  - seed was 0, is 1",
        "  - precision was fp32, is bf16",
        "  - lanes was 8, is 4",
    ]
    assert "resume.allow=[seed, precision, lanes]" in text


@pytest.mark.parametrize(
    "override",
    [
        "name=other", "run_dir=elsewhere", "log_every=3", "loader.workers=2",
        "checkpoint.every_steps=5", "distributed.timeout=9", "task=../there/task.py:Good",
        "evaluation.mode=rank0", "resume.checkpoint=auto",
    ],
)  # fmt: skip
def test_what_does_not_shape_the_run_may_change(override: str) -> None:
    refuse_another_run(config(override), PLAN, point())


def test_another_number_of_ranks_is_the_same_run() -> None:
    refuse_another_run(config(), {**PLAN, "world": 4, "lanes_per_rank": [2, 2, 2, 2]}, point())


@pytest.mark.parametrize(
    ("plan", "versions", "words"),
    [
        ({}, {}, []),
        ({"device": "cpu"}, {"torch": torch.__version__}, []),
        ({"device": "cuda"}, {}, ["device was cuda, is cpu"]),
        ({"threads_per_rank": 2}, {}, ["threads_per_rank was 2, is 1"]),
        ({"device": "cuda"}, {"torch": "1.0"}, ["device was cuda, is cpu", "torch was 1.0, is "]),
    ],
)
def test_what_may_change_the_last_bit_is_reported_and_is_no_error(
    plan: dict[str, Any], versions: dict[str, str], words: list[str]
) -> None:
    warnings: list[str] = []
    saved = ResumePoint(Path(), manifest(plan=plan, versions={**versions}))
    warn_of_other_bits({"device": "cpu", "threads_per_rank": 1}, saved, warnings.append)
    assert len(warnings) == bool(words)
    assert all(word in warnings[0] for word in words)


def test_a_run_resumes_from_its_newest_valid_checkpoint(tmp_path: Path) -> None:
    assert find_resume_point(config(), tmp_path, False, pytest.fail) is None
    for step in (2, 4):
        put(tmp_path / "checkpoints", saved=manifest(step))
    found = find_resume_point(config(), tmp_path, False, pytest.fail)
    assert found is not None
    assert found.folder == tmp_path / "checkpoints" / folder_name(4)
    never = config("resume=never")
    assert find_resume_point(never, tmp_path, False, pytest.fail) is None
    again = find_resume_point(never, tmp_path, True, pytest.fail)
    assert again is not None, "a restart of the launch that started it resumes"
    assert again.manifest.step == 4


def test_a_run_begins_again_at_its_best_checkpoint(tmp_path: Path) -> None:
    best, own = config("resume=best"), tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match=r"is best, and the run in .* holds no checkpoint"):
        find_resume_point(best, tmp_path, False, pytest.fail)
    put(own, saved=manifest(2))
    with pytest.raises(CheckpointError, match="was never evaluated"):
        find_resume_point(best, tmp_path, False, pytest.fail)
    put(own, saved=manifest(4, best=Best(4, "val_loss", 0.5)))
    newest = find_resume_point(best, tmp_path, False, pytest.fail)
    assert newest is not None
    assert (newest.manifest.step, newest.branches) == (4, False), "there is nothing to set aside"
    put(own, saved=manifest(6, best=Best(4, "val_loss", 0.5)))
    found = find_resume_point(best, tmp_path, False, pytest.fail)
    assert found is not None
    assert (found.folder, found.branches) == (own / folder_name(4), True)
    again = find_resume_point(best, tmp_path, True, pytest.fail)
    assert again is not None
    assert again.manifest.step == 6, "a restart of the launch resumes where it was"
    flipped(MODEL)(own / folder_name(4))
    with pytest.raises(CheckpointError, match=r"step-00000004 cannot be used: .*\(checksum\)"):
        find_resume_point(best, tmp_path, False, pytest.fail)


@pytest.mark.parametrize("inside", ["", "checkpoints/step-00000002"])
def test_a_run_resumes_from_a_path(tmp_path: Path, inside: str) -> None:
    other = tmp_path / "other"
    put(other / "checkpoints", saved=manifest(2))
    requested = config(f"resume.checkpoint={other / inside}")
    found = find_resume_point(requested, tmp_path / "mine", False, pytest.fail)
    assert found is not None
    assert found.folder == other / "checkpoints" / folder_name(2)

    # Interrupted and started again, it resumes from its own.
    mine = manifest(4, config=requested.model_dump(mode="json"))
    put(tmp_path / "mine" / "checkpoints", saved=mine)
    found = find_resume_point(requested, tmp_path / "mine", False, pytest.fail)
    assert found is not None
    assert found.folder == tmp_path / "mine" / "checkpoints" / folder_name(4)

    # What another start has left there is not its own.
    put(tmp_path / "mine" / "checkpoints", saved=manifest(6))
    found = find_resume_point(requested, tmp_path / "mine", False, pytest.fail)
    assert found is not None
    assert found.manifest.step == 2


def test_a_path_without_a_valid_checkpoint_is_refused(tmp_path: Path) -> None:
    damaged = put(tmp_path / "checkpoints")
    flipped(TRAINING)(damaged)
    warnings: list[str] = []
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoint\(s\) in .* can be used"):
        find_resume_point(config(f"resume.checkpoint={tmp_path}"), tmp_path / "mine", False, warnings.append)
    assert len(warnings) == 1
    with pytest.raises(CheckpointError, match=r"is not a valid checkpoint: .*\(checksum\)"):
        find_resume_point(config(f"resume.checkpoint={damaged}"), tmp_path / "mine", False, warnings.append)
    with pytest.raises(CheckpointError, match=r"it has no manifest\.json"):
        find_resume_point(config("resume.checkpoint=nowhere"), tmp_path / "mine", False, warnings.append)


def test_a_run_resumes_from_a_path_though_its_own_checkpoints_are_damaged(tmp_path: Path) -> None:
    good = put(tmp_path / "elsewhere")
    (put(tmp_path / "run" / "checkpoints") / MODEL).unlink()
    requested = config(f"resume.checkpoint={good}")
    found = find_resume_point(requested, tmp_path / "run", False, lambda line: None)
    assert found is not None
    assert found.folder == good
