"""A loss over the whole global batch in a loop of one's own, from gathered rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.errors import StepError
from tests.distributed.contrastive_tasks import Views, made_data
from tests.ranks import run_ranks


def _loop(folder: str, whole: bool) -> tuple[list[float], dict[str, list[Any]]]:
    config = {"global_batch": 32, "lanes": 8, "epochs": 2, "run_dir": folder, "seed": 3}
    config["distributed"] = {"threads_per_rank": 1, "device": "cpu"}
    task, losses = Views(), []
    with samestep.start(config) as run:
        model = task.model()
        run.prepare(model, task.optimizers(model))
        for step in run.steps(made_data()):
            if whole:
                step.train_global(lambda batch: task.embed(model, batch), _loss)
            else:
                _by_hand(step, task, model)
            losses.append(step.loss.item())
        return losses, {name: value.tolist() for name, value in model.state_dict().items()}


def _loss(z: torch.Tensor, batch: Any) -> torch.Tensor:
    return samestep.losses.nt_xent(z)


def _by_hand(step: Any, task: Views, model: torch.nn.Module) -> None:
    with torch.no_grad():
        seen = [task.embed(model, batch) for batch in step.lanes]
    rows, mine = step.gather(seen)
    loss = samestep.losses.nt_xent(rows.requires_grad_()) * len(rows)
    (gradient,) = torch.autograd.grad(loss, rows)
    assert [own.stop - own.start for own in mine] == [len(one) for one in seen]
    for batch, own in zip(step.lanes, mine, strict=True):
        z = task.embed(model, batch)
        assert torch.equal(z, rows[own]), "the second pass draws as the first did"
        share = loss.detach() * (len(batch) / len(rows))
        step.backward_rows(z, gradient[own], loss=share, count=len(batch))
    step.update()


def test_it_is_the_same_at_any_size_and_that_of_train_global(tmp_path: Path) -> None:
    """With BatchNorm, dropout, and a tail in which some ranks have nothing."""
    by_hand = [run_ranks(_loop, world, str(tmp_path / f"{world}"), False)[0] for world in (1, 2, 4)]
    losses, weights = by_hand[0]
    assert len(losses) == 6
    assert len(set(losses)) == 6
    assert by_hand[1:] == [by_hand[0]] * 2
    whole, trained = run_ranks(_loop, 2, str(tmp_path / "whole"), True)[0]
    assert whole == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(
            torch.tensor(trained[name]), torch.tensor(value), rtol=1e-4, atol=1e-5
        )


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = {"global_batch": 4, "lanes": 2, "steps": 1, "run_dir": str(tmp_path / "run")}
    model = torch.nn.Linear(6, 5)
    with samestep.start(config) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in run.steps(made_data()):
            seen = [model(batch.x).detach() for batch in step.lanes]
            with pytest.raises(StepError, match="got 1 tensors for 2 lanes"):
                step.gather(seen[:1])
            with pytest.raises(StepError, match="a row for each of its 2 samples"):
                step.gather([one[:1] for one in seen])
            rows, mine = step.gather(seen)
            for batch, own in zip(step.lanes, mine, strict=True):
                z = model(batch.x)
                with pytest.raises(StepError, match="give the gradient of these rows"):
                    step.backward_rows(z, rows, loss=0.0, count=2)
                step.backward_rows(z, rows[own], loss=0.0, count=2)
            step.update()
