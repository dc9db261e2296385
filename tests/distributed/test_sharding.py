"""`distributed.shard: optimizer`: states and summed gradients on owners, with the bits of the unsharded run."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import PeerLost, Stopped, TaskError
from samestep.reduce import owned_bucket
from samestep.train.callbacks import GradientNorms
from tests.distributed.loop_bodies import BODIES, EPOCHS, Lookahead, loader
from tests.distributed.running import digest, rows_of
from tests.ranks import answers_of_ranks, run_ranks
from tests.variations import variations


class Net(nn.Module):
    """BatchNorm, dropout, a type of its own, and a layer that some lanes leave out."""

    def __init__(self, leaves_out: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.hidden, self.out = nn.Linear(288, 24), nn.Linear(24, 10)
        self.extra = nn.Linear(24, 24)
        self.shift = nn.Parameter(torch.zeros(24, dtype=torch.float64))
        self.leaves_out = leaves_out

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.conv(x)).relu().flatten(1), 0.3, self.training)
        x = self.hidden(x).relu()
        if not self.leaves_out or x.size(0) == 3:
            x = self.extra(x)
        return self.out(x + self.shift.float())


def _keys(folder: str, shard: str, **values: Any) -> dict[str, Any]:
    section = {"device": "cpu", "threads_per_rank": 1, "shard": shard}
    section |= values.pop("distributed", {})
    return {
        "epochs": 2, "lanes": 8, "seed": 1, "run_dir": folder, "clip": {"norm": 0.5}, "check_ranks_every": 1,
        "distributed": section, **values,
    }  # fmt: skip


def _digest(run: samestep.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    with run.whole_state():
        states = [optimizer.state[param] for param in model.parameters() if run.is_main]
        for state in states:
            for value in state.values():
                found.update(torch.as_tensor(value).numpy().tobytes())
    return found.hexdigest()


def _train(
    folder: str, shard: str, form: str, stop: int | None = None, more: Any = None
) -> tuple[str, list[float], float]:
    """Train; returns a digest of weights and states (rank 0's is of all), losses, and the share of states."""
    values = dict(more or {})
    leaves_out = "find_unused_parameters" in values.get("distributed", {})
    try:
        with samestep.start(**_keys(folder, shard, **values)) as run:
            if stop is not None:
                run.pause_after(stop)
            model = Net(leaves_out)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            model, optimizer, data = run.prepare(model, optimizer, loader())
            seen = []
            for _ in run.epochs():
                if form == "steps":
                    for step in run.steps(data):
                        loss = step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
                        seen.append(loss.item())
                    continue
                for x, y in data:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                    seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
                    optimizer.step()
                    seen.append(loss.item())
            held = sum(param.numel() for param in optimizer.state)
            share = held / sum(param.numel() for param in model.parameters())
            return _digest(run, model, optimizer), seen, share
    except Stopped:
        return "stopped", [], 0.0


CASES: dict[str, dict[str, Any]] = {
    "plainly": {},
    "groups": {"clip": {"norm": 0.5, "per_group": True}},
    "adaptive": {"clip": {"adaptive": 1.5}},
    "skips": {"on_nonfinite": "skip"},
    "unused": {"distributed": {"find_unused_parameters": True}},
}


@pytest.mark.parametrize("case", variations(CASES, kept=["unused"]))
def test_owners_are_the_same_run_at_any_size(tmp_path: Path, case: str) -> None:
    [expected] = run_ranks(_train, 1, str(tmp_path / "1"), "none", "steps", None, CASES[case])
    for world in (2, 3, 4):
        folder = str(tmp_path / str(world))
        answers = run_ranks(_train, world, folder, "optimizer", "steps", None, CASES[case])
        assert answers[0][:2] == expected[:2]
        assert [seen for _, seen, _ in answers] == [expected[1]] * world
        assert sum(share for _, _, share in answers) == pytest.approx(1.0)
        assert max(share for _, _, share in answers) < 0.9


def _by_slices(form: str, folder: str, shard: str, name: str) -> Any:
    """Train while all buckets go by slices, also those that are small and even."""
    owned_bucket._LEAST_BYTES, owned_bucket._WORTH_SLICES = 0, 0.0
    return loop_of(folder, shard, name) if form == "body" else _train(folder, shard, form)[:2]


@pytest.mark.parametrize(
    ("form", "name"),
    variations([("steps", ""), ("loop", ""), ("body", "adversaries"), ("body", "scaled")], kept=[("body", "scaled")]),
)
def test_sums_by_slices_are_the_same_run(tmp_path: Path, form: str, name: str) -> None:
    [expected] = run_ranks(_by_slices, 1, form, str(tmp_path / "1"), "none", name)
    shards = ("optimizer", "weights") if form == "body" else ("optimizer",)
    for world, shard in itertools.product((2, 4), shards):
        folder = str(tmp_path / f"{shard}{world}")
        answers = run_ranks(_by_slices, world, form, folder, shard, name)
        assert answers[0] == expected
        assert [seen for _, seen in answers] == [expected[1]] * world


def test_a_loop_clips_by_the_whole_norm(tmp_path: Path) -> None:
    """Every rank sees whole gradients: a partial norm would clip less, and silently."""
    [expected] = run_ranks(_train, 1, str(tmp_path / "1"), "none", "loop")
    for world in (2, 4):
        answers = run_ranks(_train, world, str(tmp_path / str(world)), "optimizer", "loop")
        assert answers[0][:2] == expected[:2]
        assert [seen for _, seen, _ in answers] == [expected[1]] * world


def test_a_run_resumes_with_and_without_owners(tmp_path: Path) -> None:
    [expected] = run_ranks(_train, 1, str(tmp_path / "whole"), "none", "steps")
    folder = str(tmp_path / "parts")
    for world, shard, stop in ((4, "optimizer", 3), (1, "none", 5), (3, "optimizer", 8)):
        answers = run_ranks(_train, world, folder, shard, "steps", stop)
        assert {answer[0] for answer in answers} == {"stopped"}
    assert run_ranks(_train, 2, folder, "none", "steps")[0][0] == expected[0]


def loop_of(folder: str, shard: str, name: str, stop: int | None = None, **values: Any) -> tuple[str, list[float]]:
    """Train by a loop over the loader; returns a digest of the weights, on rank 0, and what the loop has seen."""
    keys = _keys(folder, shard, **{"epochs": EPOCHS, "clip": {}, **values})
    try:
        with samestep.start(**keys) as run:
            if stop is not None:
                run.pause_after(stop)
            model, seen = BODIES[name](run)
            with run.whole_state():
                return digest(model) if run.is_main else "", seen
    except Stopped:
        return "stopped", []


@pytest.mark.variation("test_sums_by_slices_are_the_same_run: without slices")
@pytest.mark.parametrize(
    "name", variations(["adversaries", "convolutions", "scaled", "autoencoder"], kept=["adversaries"])
)
def test_loops_of_ones_own_are_the_same_run(tmp_path: Path, name: str) -> None:
    """A GAN has weights that another optimizer's step leaves as they are, for a graph that is still to run back."""
    [expected] = run_ranks(loop_of, 1, str(tmp_path / "1"), "none", name)
    for world, shard in ((2, "optimizer"), (4, "optimizer"), (3, "weights"), (4, "weights")):
        answers = run_ranks(loop_of, world, str(tmp_path / f"{shard}{world}"), shard, name)
        assert answers[0] == expected
        assert [seen for _, seen in answers] == [expected[1]] * world


class Heads(nn.Module):
    """Two outputs, each with a loss of its own; a backward pass reads weights of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 10)
        self.second = nn.Sequential(nn.Linear(64, 24), nn.Linear(24, 24), nn.Linear(24, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x.flatten(1)), self.second(x.flatten(1))


def _in_turn(folder: str, shard: str, stop: int | None = None) -> str:
    """One optimizer steps for one loss, then for the other, whose graph was made before the first step."""
    try:
        with samestep.start(**_keys(folder, shard, clip={})) as run:
            if stop is not None:
                run.pause_after(stop)
            model = Heads()
            optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
            schedule: Any = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])
            model, optimizer, schedule, data = run.prepare(model, optimizer, schedule, loader())
            for x, y in (batch for _ in run.epochs() for batch in data):
                first, second = model(x)
                F.cross_entropy(first, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                F.cross_entropy(second, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            return _digest(run, model, optimizer)
    except Stopped:
        return "stopped"


@pytest.mark.variation("test_owners_are_the_same_run_at_any_size: with parameters that no lane uses")
def test_weights_without_a_gradient_are_left_alone(tmp_path: Path) -> None:
    [expected] = run_ranks(_in_turn, 1, str(tmp_path / "1"), "none")
    for world in (2, 4):
        assert run_ranks(_in_turn, world, str(tmp_path / str(world)), "optimizer")[0] == expected
    run_ranks(_in_turn, 4, str(tmp_path / "parts"), "optimizer", 4)
    assert run_ranks(_in_turn, 2, str(tmp_path / "parts"), "optimizer")[0] == expected


class ZeroForNone(torch.optim.Optimizer):
    """Steps parameters without a gradient, too: by their momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (p for group in self.param_groups for p in group["params"]):
            if param.grad is not None or param in self.state:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.mul_(0.9)
                if param.grad is not None:
                    mean.add_(param.grad)
                param.sub_(mean, alpha=0.01)


def _takes_turns(folder: str, shard: str) -> list[float]:
    """Two heads that are used alternately; returns what this rank's weights add up to."""
    with samestep.start(**_keys(folder, shard, clip={}, check_ranks_every=None)) as run:
        model = Heads()
        optimizer: Any = ZeroForNone(model.parameters())
        model, optimizer, data = run.prepare(model, optimizer, loader())
        for x, y in (batch for _ in run.epochs() for batch in data):
            first, second = model(x)
            F.cross_entropy(first if run.step % 2 else second, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [float(param.double().sum()) for param in model.parameters()]


def test_optimizers_that_change_weights_without_a_gradient_are_followed(tmp_path: Path) -> None:
    [expected] = run_ranks(_takes_turns, 1, str(tmp_path / "1"), "none")
    answers = run_ranks(_takes_turns, 3, str(tmp_path / "3"), "optimizer")
    assert answers == [expected] * 3


class Joint(torch.optim.SGD):
    """Clips by the norm of all gradients, by an option that is not in its defaults."""

    def __init__(self, params: Any, max_norm: float) -> None:
        super().__init__(params, lr=0.1)
        self.max_norm = max_norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        nn.utils.clip_grad_norm_(params, self.max_norm)
        super().step(closure)


class Sign(torch.optim.Optimizer):
    """An optimizer from elsewhere, whose constructor takes nothing but this."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                param.sub_(mean.lerp_(param.grad, 0.1).sign(), alpha=group["lr"])


class OwnAdamW(torch.optim.AdamW):
    pass


def _prepared(folder: str, kind: str) -> None:
    with samestep.start(**_keys(folder, "optimizer")) as run:
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(10)) if kind == "lazy" else Net()
        params = model.parameters()
        made: Any = (
            Lookahead(params) if kind == "wrapping" else Joint(params, 0.1) if kind == "joint" else Sign(params, 0.1)
        )
        run.prepare(model, made, loader())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("joint", "Joint updates a parameter differently when it has others"),
        ("wrapping", "Lookahead holds another optimizer (SGD)"),
        ("lazy", "is a LazyLinear whose shapes are not known yet"),
    ],
)
def test_what_owners_cannot_step_is_refused(tmp_path: Path, kind: str, why: str) -> None:
    for ok, text in answers_of_ranks(_prepared, 2, str(tmp_path), kind, seconds=100):
        assert not ok
        assert TaskError.__name__ in text
        assert why in text


def _others(folder: str, shard: str, kind: str, stop: int | None = None) -> str:
    """Free parameters, a layout of its own, and optimizers that are not torch's."""
    try:
        with samestep.start(**_keys(folder, shard)) as run:
            if stop is not None:
                run.pause_after(stop)
            model = Net().to(memory_format=torch.channels_last)
            free = [nn.Parameter(torch.ones(size)) for size in (24, 10)]
            params: list[Any] = [*(free if kind == "free" else ()), *model.parameters()]
            made = {
                "sign": lambda: Sign(params, 1e-3),
                "own": lambda: OwnAdamW(params, 1e-2),
                "fused": lambda: torch.optim.AdamW(params, 1e-2, fused=True),
                "free": lambda: torch.optim.AdamW(params, 1e-2),
            }
            model, _, data = run.prepare(model, made[kind](), loader())
            for step in run.steps(data):
                step.train(lambda batch: F.cross_entropy(model(batch.x) * free[1] + free[0].mean(), batch.y))
            found = hashlib.blake2b(digest_size=8)
            for tensor in (*free, *model.state_dict().values()):
                found.update(tensor.detach().numpy().tobytes())
            return found.hexdigest()
    except Stopped:
        return "stopped"


def test_parameters_of_no_module_have_owners(tmp_path: Path) -> None:
    """Ranks are compared after every step, state by state."""
    [expected] = run_ranks(_others, 1, str(tmp_path / "whole"), "none", "free")
    assert run_ranks(_others, 3, str(tmp_path / "three"), "optimizer", "free") == [expected] * 3


@pytest.mark.variation("test_a_run_resumes_with_and_without_owners: with other optimizers")
@pytest.mark.parametrize("kind", variations(["sign", "own", "fused"], kept=["own"]))
def test_other_optimizers_and_layouts_resume(tmp_path: Path, kind: str) -> None:
    [expected] = run_ranks(_others, 1, str(tmp_path / "whole"), "none", kind)
    folder = str(tmp_path / "parts")
    assert run_ranks(_others, 3, folder, "optimizer", kind, 3) == ["stopped"] * 3
    assert run_ranks(_others, 2, folder, "optimizer", kind, 6) == ["stopped"] * 2
    assert run_ranks(_others, 2, folder, "optimizer", kind) == [expected] * 2


def _norms(folder: str, shard: str) -> None:
    with samestep.start(**_keys(folder, shard)) as run:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, data = run.prepare(model, optimizer, loader())
        run.add_listener(GradientNorms(run, every=2, depth=1))
        for step in run.steps(data):
            step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))


def test_a_listener_that_reads_gradients_has_them_all(tmp_path: Path) -> None:
    written = []
    for world, shard in ((1, "none"), (3, "optimizer")):
        run_ranks(_norms, world, str(tmp_path / shard), shard)
        written.append([{k: v for k, v in row.items() if "grad_norm" in k} for row in rows_of(tmp_path / shard)])
    assert written[0] == written[1]
    assert {"grad_norm/conv", "grad_norm/out", "grad_norm/shift"} <= set().union(*written[0])


def _dies(folder: str, at: int) -> str:
    keys = _keys(folder, "optimizer", checkpoint={"every_steps": 2})
    with samestep.start(**keys) as run:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, data = run.prepare(model, optimizer, loader())
        for step in run.steps(data):
            if step.index == at and run.rank == 1:
                os._exit(3)
            step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
        return _digest(run, model, optimizer)


def _ends_in_a_save(folder: str, at: int, how: str) -> str:
    """Train; from a step on, the last rank ends while it writes its part, or is slow and then the run fails."""
    from samestep.checkpoint import store

    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    write = store.write_part

    def write_part(files: Any, partial: Path, *args: Any) -> None:
        if f"{at:08d}" in partial.name and last:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(7)
        write(files, partial, *args)

    store.write_part = write_part
    rules = {"every_steps": 2, "asynchronous": how != "killed"}
    with samestep.start(**_keys(folder, "optimizer", checkpoint=rules)) as run:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        model, optimizer, data = run.prepare(model, optimizer, loader())
        for step in run.steps(data):
            if step.index == at and how == "raises":
                raise ZeroDivisionError("a failure on purpose")
            step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
        return _digest(run, model, optimizer)


@pytest.mark.parametrize(("how", "saved"), variations([("killed", 2), ("raises", 4)], kept=["killed"]))
def test_a_run_that_ends_in_a_save_neither_hangs_nor_loses_it(tmp_path: Path, how: str, saved: int) -> None:
    """Rank 0 waits for parts that are still written, and not for a rank that is gone."""
    [whole] = run_ranks(_ends_in_a_save, 1, str(tmp_path / "whole"), -1, "")
    answers = answers_of_ranks(_ends_in_a_save, 2, str(tmp_path / "run"), 4, how, seconds=60)
    assert [ok for ok, _ in answers] == [False] * 2
    assert (PeerLost.__name__ if how == "killed" else "a failure on purpose") in str(answers[0][1])
    saves = sorted((tmp_path / "run" / "checkpoints").glob("step-????????"))
    assert saves[-1].name == f"step-{saved:08d}"
    assert run_ranks(_ends_in_a_save, 3, str(tmp_path / "run"), -1, "")[0] == whole


def test_a_lost_owner_ends_the_run_which_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    [whole] = run_ranks(_dies, 1, str(tmp_path / "whole"), -1)
    answers = answers_of_ranks(_dies, 3, str(tmp_path / "run"), 5, seconds=100)
    assert [ok for ok, _ in answers] == [False] * 3
    assert PeerLost.__name__ in str(answers[0][1])
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("rank-*.log"))
    assert "the optimizer states of the lost rank are gone with it" in logs
    assert run_ranks(_dies, 2, str(tmp_path / "run"), -1)[0] == whole
