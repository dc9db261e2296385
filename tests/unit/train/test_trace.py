"""What a traced step writes, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import samestep
from samestep.train.trace import AFTER, BEFORE, LANE, SUM, Tracer, read_trace
from tests.unit.train.own_loops import Noisy, assert_equal, settings, train


def traced(folder: Path, first: int = 0, **values: object) -> dict[str, torch.Tensor]:
    with samestep.start(settings(folder, **values)) as run:
        Tracer(run, folder / "trace", first)
        return train(run)


def test_a_step_is_traced_in_the_order_in_which_it_computes(tmp_path: Path) -> None:
    traced(tmp_path, epochs=1)
    (entries,) = read_trace(tmp_path / "trace")
    assert {entry.step for entry in entries} == {0, 1, 2}
    assert {e.step for e in entries if e.part == BEFORE} == {0}, "then it is the last update's"
    lane = [e for e in entries if (e.step, e.part, e.lane) == (1, LANE, 2)]
    assert [e.order for e in lane] == list(range(len(lane)))
    seen = [(e.kind, e.name) for e in lane]
    assert seen[:7] == [
        ("samples", ""), ("batch", "0"), ("batch", "1"),
        ("input", "model"), ("input", "model.0"), ("output", "model.0"), ("input", "model.1"),
    ]  # fmt: skip
    at = seen.index(("output", "model"))
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert seen[at + 1 : -6] == [
        ("loss", ""), ("loss", "count"), *(("buffer", f"model.1.{name}") for name in statistics),
    ]  # fmt: skip
    backward = [name for kind, name in seen[-6:] if kind == "gradient"]
    assert [name.partition(".")[0] for name in backward] == ["3", "3", "1", "1", "0", "0"]
    sums = [(e.kind, e.name) for e in entries if (e.step, e.part) == (1, SUM)]
    assert sums[:2] == [("gradient", "0.weight"), ("gradient", "0.bias")]
    assert sums[-1] == ("buffer", "model.1.num_batches_tracked")
    state = [e.name for e in entries if (e.step, e.part) == (1, AFTER)]
    assert state[0].startswith("optimizer0."), "before the weights that it changes"
    assert "model.3.bias" in state


def test_lanes_that_run_together_are_traced_each_by_itself(tmp_path: Path) -> None:
    traced(tmp_path, epochs=1, batchnorm="global")
    (entries,) = read_trace(tmp_path / "trace")
    for lane in (0, 2):
        seen = [(e.kind, e.name) for e in entries if (e.step, e.part, e.lane) == (1, LANE, lane)]
        assert ("output", "model.1") in seen
        assert seen.index(("output", "model")) < seen.index(("loss", ""))
        assert len([name for kind, name in seen if kind == "gradient"]) == 6


def test_a_trace_changes_no_run_and_begins_where_it_is_to(tmp_path: Path) -> None:
    with samestep.start(settings(tmp_path / "plain")) as run:
        plain = train(run)
    assert_equal(traced(tmp_path / "traced", first=4), plain)
    (entries,) = read_trace(tmp_path / "traced" / "trace")
    assert {entry.step for entry in entries} == {4, 5}
    assert {e.step for e in entries if e.part == BEFORE} == {4}


def test_the_trial_of_a_search_for_micro_batches_leaves_no_trace(tmp_path: Path) -> None:
    for name, split in (("searched", "auto"), ("given", 1)):
        traced(tmp_path / name, steps=1, epochs=None, memory={"lane_split": split})
    searched, given = (
        [e for e in read_trace(tmp_path / name / "trace")[0] if e.part == LANE] for name in ("searched", "given")
    )
    assert searched == given


@pytest.mark.parametrize("recompute", [True, False])
def test_a_loss_over_the_whole_batch_leaves_each_lane_by_itself(recompute: bool, tmp_path: Path) -> None:
    """Whatever is kept: else what a lane shows would depend on its neighbours on a rank."""
    config = settings(tmp_path, steps=1, epochs=None, contrastive={"recompute": recompute})
    with samestep.start(config) as run:
        Tracer(run, tmp_path / "trace", 0)
        model = torch.nn.Linear(3, 2)
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(Noisy()):
            step.train_global(lambda batch: model(batch.x), lambda z, batch: model(z @ z.T[:, :3]).sum())
    (entries,) = read_trace(tmp_path / "trace")
    lanes = sorted({e.lane for e in entries if e.part == LANE})
    assert len(lanes) > 1
    expected = ["samples", "batch", "batch", "input", "output", "loss", "loss", "gradient", "gradient"]
    for lane in lanes:
        assert [e.kind for e in entries if (e.part, e.lane) == (LANE, lane)] == expected


@pytest.mark.parametrize("size", [3, 1000])
def test_some_elements_are_kept(tmp_path: Path, size: int) -> None:
    with samestep.start(settings(tmp_path)) as run:
        tracer = Tracer(run, tmp_path, 0)
        tracer._at = (0, SUM, None)
        tracer._take("gradient", "a", torch.arange(size, dtype=torch.bfloat16))
    values = tracer._entries[0].values()
    assert len(values) <= 256
    assert values.dtype == torch.bfloat16
    assert values[1] == (1 if size == 3 else 4)
