"""Custom loops that save when they want, with state of their own."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F

import samestep
from tests.distributed.loop_bodies import Counter
from tests.distributed.running import digest
from tests.distributed.test_own_loops import _keys, _net, prepared
from tests.ranks import run_ranks


class Dies(Exception):
    """As if the process had been killed."""


def _train(folder: str, dies_after: int | None = None) -> tuple[str, float, list[int]]:
    never = {"every_epochs": None, "every_steps": None, "every_minutes": None, "keep_last": 9}
    average, model, seen = Counter(), _net(), []
    try:
        with samestep.start(**_keys(folder, global_batch=None, checkpoint=never)) as run:
            model, _, loader = prepared(run)
            run.register("average", average)
            for epoch in run.epochs():
                for step in run.steps(loader):
                    seen.append(step.index)
                    loss = step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
                    if step.index == 4:
                        run.save({"note": "in an epoch"})
                    # After the call, and in the checkpoint nevertheless.
                    average.count = 0.9 * average.count + 0.1 * loss.item()
                    if step.index == dies_after:
                        raise Dies
                if epoch == 0:
                    run.save()
                    average.count += 1.0
    except Dies:
        pass
    return digest(model), average.count, seen


def _saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*"))


def test_a_run_is_saved_when_its_loop_says_so_and_resumes_from_there(tmp_path: Path) -> None:
    whole = run_ranks(_train, 1, str(tmp_path / "whole"))[0]
    assert _saved(tmp_path / "whole") == [3, 5, 9]
    for dies_after, first, worlds in ((3, 3, (1, 2)), (6, 5, (2, 4))):
        folder = tmp_path / f"dies-{dies_after}"
        run_ranks(_train, worlds[0], str(folder), dies_after)
        assert _saved(folder)[-1] == first
        for answer in run_ranks(_train, worlds[1], str(folder)):
            assert answer == (whole[0], whole[1], list(range(first, 9)))
