"""Ranks whose lanes are recorded elsewhere, beside ranks that run them: one run, in one order of calls.

On a GPU one rank may replay a CUDA graph in a step that another one runs eagerly. Here a rank that
"replays" runs its lanes by themselves, and hands in what they add up to by the same calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.running import Recorded, assert_same, settings, train, train_rank
from tests.ranks import run_ranks
from tests.variations import variations


def _train(config: dict[str, Any], record: str, recorded: tuple[int, ...]) -> None:
    from samestep.lanes.random_streams import MODEL
    from samestep.lanes.tree import LaneTree
    from samestep.reduce.gradients import Grads, RecordedSums, add_grads
    from samestep.reduce.stats import EMPTY, LaneStats
    from samestep.step.engine import LossFunction
    from samestep.step.lane_passes import LanePasses, WholeLanes

    eagerly = WholeLanes.run_step

    def run_step(self: WholeLanes, passes: LanePasses, loss: LossFunction) -> None:
        engine, step = passes.engine, passes.data.index
        if step < 2 or engine.setup.context.rank not in recorded or not passes.data.units:
            eagerly(self, passes, loss)
            return
        reduction, held = engine.reduction, engine.setup.assignment.my_units
        batches = {batch.lane: batch for batch in passes.batches.read_all()}
        rates = engine.update.begin(step)
        engine.begin_lanes()
        tree: LaneTree[Grads] = LaneTree(add_grads)
        measured: dict[int, LaneStats] = {}
        for lane in held:
            grads: Grads = [None] * len(engine.params)
            if lane in batches:
                for param in engine.params:
                    param.grad = None
                engine.setup.rng.enter(MODEL, lane, at=(step,))
                with reduction.buffers.beside_others(lane), engine.setup.precision.forward():
                    value, count = engine.terms.combine(loss(batches[lane]), len(batches[lane]))
                value.backward(reduction.gradients.start(value, count))
                measured[lane] = LaneStats(value.detach(), count)
                grads = [param.grad for param in engine.params]
            tree.push(lane, 1, grads)
        sums = RecordedSums(tree.nodes, [measured.get(lane, EMPTY) for lane in held])
        reduction.gradients.record(sums)
        reduction.buffers.record()
        stats = reduction.gradients.share_recorded(sums, engine.flags())
        reduction.buffers.start_recorded()
        reduction.gradients.exchange()
        reduction.buffers.wait()
        reduction.gradients.finish(stats)
        reduction.buffers.finish()
        updated = engine.update.change(stats, rates)
        engine.update.end(step, stats, updated)
        passes.close(stats, updated, engine.terms.totals())

    WholeLanes.run_step = run_step  # type: ignore[method-assign]
    try:
        train_rank(config, record)
    finally:
        WholeLanes.run_step = eagerly  # type: ignore[method-assign]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("task", variations(["Everything", "Tokens"], kept=["Everything"]))
@pytest.mark.parametrize(
    ("world", "recorded"), variations([(1, (0,)), (2, (1,)), (3, (0, 1, 2)), (4, (0, 2))], kept=[4])
)
def test_recorded_and_eager_ranks_are_one_run(task: str, world: int, recorded: tuple[int, ...], tmp_path: Path) -> None:
    values = {"clip": {"norm": 0.5}, "epochs": 3}
    folder = tmp_path / "recorded"
    config = settings(task, folder, **values)
    run_ranks(_train, world, config, str(folder / "record"), recorded)
    assert_same([train(tmp_path, 1, task, **values), Recorded(folder)])
