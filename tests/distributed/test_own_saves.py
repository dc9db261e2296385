"""Custom loops that save when they want, with state of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from samestep.errors import StepError
from tests.distributed.test_own_loops import _digest, _keys, _loader, _net
from tests.ranks import run_ranks


class Average:
    """A moving average of the loss, as a loop of one's own would keep."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Dies(Exception):
    """As if the process had been killed."""


def _train(folder: str, dies_after: int | None = None) -> tuple[str, float, list[int]]:
    import samestep

    never = {"every_epochs": None, "every_steps": None, "every_minutes": None, "keep_last": 9}
    average, model, seen = Average(), _net(), []
    try:
        with samestep.start(**_keys(folder, global_batch=None, checkpoint=never)) as run:
            model = _net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer, loader = run.prepare(model, optimizer, _loader())
            run.register("average", average)
            for epoch in run.epochs():
                for step in run.steps(loader):
                    seen.append(step.index)
                    loss = step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
                    if step.index == 4:
                        run.save({"note": "in an epoch"})
                    # After the call, and in the checkpoint nevertheless.
                    average.value = 0.9 * average.value + 0.1 * loss.item()
                    if step.index == dies_after:
                        raise Dies
                if epoch == 0:
                    run.save()
                    average.value += 1.0
    except Dies:
        pass
    return _digest(model), average.value, seen


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


def _misuse(folder: str, kind: str) -> str:
    import samestep

    try:
        with samestep.start(**_keys(folder, epochs=1)) as run:
            model = _net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if kind == "twice":
                run.register("a", Average())
                run.register("a", Average())
            if kind == "no state":
                run.register("a", 3)  # type: ignore[arg-type]
            model, optimizer, loader = run.prepare(model, optimizer, _loader())
            if kind == "before":
                run.save()
            for step in run.steps(loader):
                if kind == "open":
                    run.save()
                step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
            if kind == "after":
                run.save()
    except StepError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("before", "run.save belongs inside the loop over the training data"),
        ("open", "run.save came before the update of step 0"),
        ("after", "at its end by itself"),
        ("twice", "run.register was called twice for 'a'"),
        ("no state", "run.register('a') got a int: it needs state_dict()"),
    ],
)
def test_saves_that_could_not_be_resumed_are_refused(kind: str, words: str, tmp_path: Path) -> None:
    assert words in run_ranks(_misuse, 1, str(tmp_path / "run"), kind)[0]
