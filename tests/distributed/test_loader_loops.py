"""Loops over the loader itself: a body that runs once per step on every rank, the same at any size."""

from __future__ import annotations

import io
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

import samestep
from samestep.errors import StepError, Stopped
from tests.distributed.batchnorm_tasks import UnevenStreams
from tests.distributed.loop_bodies import BATCH, BODIES, EPOCHS, SAMPLES, loader
from tests.distributed.running import digest, rows_of
from tests.ranks import answers_of_ranks, run_ranks
from tests.variations import variations


def _keys(folder: str, **values: Any) -> dict[str, Any]:
    return {
        "epochs": EPOCHS, "lanes": 8, "seed": 1, "run_dir": folder,
        "distributed": {"device": "cpu", "threads_per_rank": 1}, **values,
    }  # fmt: skip


def train_body(folder: str, name: str, stop: int | None = None, **values: Any) -> tuple[str, list[float]]:
    try:
        with samestep.start(**_keys(folder, **values)) as run:
            if stop is not None:
                run.pause_after(stop)
            model, seen = BODIES[name](run)
            return digest(model), seen
    except Stopped:
        return "stopped", []


@pytest.mark.parametrize("name", variations(list(BODIES), kept=["convolutions", "adversaries", "refilled"]))
def test_a_loop_is_one_run_at_any_size(tmp_path: Path, name: str) -> None:
    [expected] = run_ranks(train_body, 1, str(tmp_path / "1"), name)
    assert len(expected[1]) >= 8
    for world in (2, 4):
        assert run_ranks(train_body, world, str(tmp_path / str(world)), name) == [expected] * world


@pytest.mark.variation("test_a_loop_is_one_run_at_any_size: on three ranks")
def test_a_world_that_does_not_divide_the_lanes(tmp_path: Path) -> None:
    """Three, three and two lanes; in the tail, one rank has none."""
    [expected] = run_ranks(train_body, 1, str(tmp_path / "1"), "convolutions")
    assert run_ranks(train_body, 3, str(tmp_path / "3"), "convolutions") == [expected] * 3


class _Marked(nn.Module):
    """Holds a table that never changes, as an attention's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 3)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(200, 200))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)) * self.mask[0, 0]


class _Stream(IterableDataset[Any]):
    lane_stream = UnevenStreams.lane_stream

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("lanes have their own streams")


def _uneven_streams(folder: str, batchnorm: str) -> tuple[str, list[Any]]:
    keys = _keys(folder, lanes=4, batchnorm=batchnorm, loss_weights={"a": 1.0, "b": 0.5}, log_every=1)
    with samestep.start(**keys, steps_per_epoch=6, drop_last=False) as run:
        model = nn.Sequential(_Marked(), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = DataLoader(_Stream(), batch_size=24)
        model, optimizer, data = run.prepare(model, optimizer, data)
        for _ in run.epochs():
            for x, y in data:
                optimizer.zero_grad()
                out = model(x)
                each = F.cross_entropy(out, y, reduction="sum")
                run.backward({"a": (each, y.size(0)), "b": (out.square().sum(), y.size(0))})
                optimizer.step()
    rows = rows_of(Path(folder))
    return digest(model), [[row[key] for key in ("loss", "loss/a", "loss/b")] for row in rows if "loss/a" in row]


@pytest.mark.parametrize("batchnorm", variations(["lane", "global"], kept=["lane"]))
def test_streams_that_end_and_losses_with_names(tmp_path: Path, batchnorm: str) -> None:
    """Ranks without samples run the loop's lines; a lane's named losses are counted once."""
    [expected] = run_ranks(_uneven_streams, 1, str(tmp_path / "1"), batchnorm)
    assert len(expected[1]) == 2 * 6
    for loss, a, b in expected[1]:
        assert loss == pytest.approx(a + 0.5 * b, rel=1e-5)
    for world in (2, 4):
        folder = str(tmp_path / str(world))
        assert run_ranks(_uneven_streams, world, folder, batchnorm) == [expected] * world


def _dies(folder: str, at: int) -> tuple[str, list[float]]:
    with samestep.start(**_keys(folder, checkpoint={"every_steps": 1})) as run:
        model, optimizer, data = _prepared(run)
        for _ in run.epochs():
            for x, y in data:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                if run.step == at and run.rank == 1:
                    os._exit(3)
                loss.backward()
                optimizer.step()
        return digest(model), [loss.item()]


def test_a_rank_that_dies_in_a_body_loses_nothing(tmp_path: Path) -> None:
    [expected] = run_ranks(_dies, 1, str(tmp_path / "whole"), -1)
    began = time.monotonic()
    answers = answers_of_ranks(_dies, 2, str(tmp_path / "run"), 3, seconds=120)
    assert [ok for ok, _ in answers] == [False, False]
    assert "lost" in str(answers[0][1])
    assert time.monotonic() - began < 100, "the other rank waits for nobody"
    assert run_ranks(_dies, 4, str(tmp_path / "run"), -1) == [expected] * 4


@pytest.mark.parametrize(
    "name",
    variations(
        ["convolutions", "sharpness", "diffusion", "unlabelled", "refilled", "policy", "older"], kept=["policy"]
    ),
)
def test_it_resumes_at_another_size(tmp_path: Path, name: str) -> None:
    [untouched] = run_ranks(train_body, 1, str(tmp_path / "whole"), name)
    assert run_ranks(train_body, 4, str(tmp_path / "parts"), name, 3) == [("stopped", [])] * 4
    run_ranks(train_body, 2, str(tmp_path / "parts"), name, 7)
    for weights, seen in run_ranks(train_body, 4, str(tmp_path / "parts"), name):
        assert weights == untouched[0]
        assert seen[:3] == untouched[1][-len(seen) :][:3]  # its sum over the epoch is of the rest


def _by_next(folder: str) -> list[int]:
    """nanoGPT's form: batches taken by `next`, two per update, and nobody asks for one after the last."""
    keys = _keys(folder, steps=6, epochs=None, log_every=1, checkpoint={"enabled": False})
    with samestep.start(**keys) as run:
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, data = run.prepare(model, optimizer, loader())
        batches = run.enumerate(tqdm(data, disable=True))
        for _ in range(3):
            for _, (_, (x, y)) in zip(range(2), batches, strict=False):
                (F.cross_entropy(model(x.flatten(1)), y) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [row["step"] for row in rows_of(Path(folder)) if "loss" in row]


def test_a_loop_that_takes_its_batches_by_next_records_its_last_step(tmp_path: Path) -> None:
    assert run_ranks(_by_next, 2, str(tmp_path)) == [list(range(6))] * 2


def _estimates(folder: str, stop: int | None = None) -> list[float]:
    """What a loop estimates before every second step, by what it draws outside of lanes."""
    estimates: list[float] = []
    with suppress(Stopped), samestep.start(**_keys(folder, steps=8, epochs=None)) as run:
        if stop is not None:
            run.pause_after(stop)
        with run.no_lanes():
            fixed = torch.randn(4, 1, 8, 8)  # before run.prepare: once for the whole run
        model, optimizer, data = _prepared(run)
        batches = iter(data)
        for number in range(run.start_step, 8):
            if number % 2 == 0:
                with torch.no_grad(), run.no_lanes():
                    noise = torch.randn(4, 1, 8, 8) * random.random()
                    estimates.append(float(model(fixed + noise).sum()))
            x, y = next(batches)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return estimates


@pytest.mark.variation("test_it_resumes_at_another_size: with draws between the steps")
def test_draws_outside_of_lanes_are_the_same_in_a_resumed_run(tmp_path: Path) -> None:
    [expected] = run_ranks(_estimates, 1, str(tmp_path / "whole"))
    assert len(set(expected)) == 4
    run_ranks(_estimates, 1, str(tmp_path / "parts"), 2)
    run_ranks(_estimates, 2, str(tmp_path / "parts"), 5)
    assert run_ranks(_estimates, 4, str(tmp_path / "parts")) == [expected[3:]] * 4
    run_ranks(_estimates, 2, str(tmp_path / "two"), 4)
    assert run_ranks(_estimates, 1, str(tmp_path / "two")) == [expected[2:]]


def _bars(folder: str) -> list[int]:
    with samestep.start(**_keys(folder)) as run:
        model, optimizer, data = _prepared(run)
        numbers = []
        for _ in run.epochs():
            for i, (x, y) in run.enumerate(tqdm(data, disable=True)):
                numbers.append(i)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        return numbers


def test_steps_are_counted_through_a_progress_bar(tmp_path: Path) -> None:
    [numbers] = run_ranks(_bars, 1, str(tmp_path))
    assert numbers == list(range(len(numbers) // 2)) * 2


class PlainRun:
    """What a script without samestep has in place of a run."""

    device, start_step = torch.device("cpu"), 0

    def prepare(self, *items: Any) -> Any:
        return items

    def epochs(self) -> range:
        return range(EPOCHS)

    def enumerate(self, data: Any) -> Any:
        return enumerate(data)

    def register(self, name: str, item: Any) -> None:
        pass

    def backward(self, loss: Tensor, reduction: str = "mean", mean_over: Any = None) -> Tensor:
        loss.backward()
        return loss.detach()

    def mean(self, loss: Tensor) -> Tensor:
        return loss.detach()

    def sum(self, value: Tensor) -> Tensor:
        return value


def _against_plain(folder: str, name: str, lanes: int) -> tuple[list[Any], ...]:
    import tests.distributed.loop_bodies as bodies

    bodies.SHUFFLES, bodies.DROPS = False, 0.0
    with samestep.start(**_keys(folder, lanes=lanes)) as run:
        mine, seen = BODIES[name](run)
    with samestep.start(**_keys(f"{folder}-again", lanes=lanes)):  # the same first weights
        plain, expected = BODIES[name](PlainRun())  # type: ignore[arg-type]
    mine_state, plain_state = ([t.tolist() for t in m.state_dict().values()] for m in (mine, plain))
    return mine_state, plain_state, seen, expected


@pytest.mark.parametrize(
    ("name", "lanes"),
    variations(
        [
            ("convolutions", 1),
            ("sharpness", 1),
            ("scaled", 1),
            ("summed", 1),
            ("summed", 8),
            ("unlabelled", 1),
            ("refilled", 1),
            ("refilled", 8),
            ("policy", 1),
        ],
        kept=["convolutions", ("summed", 8), ("refilled", 8)],
    ),
)
def test_it_is_the_script_without_us(tmp_path: Path, name: str, lanes: int) -> None:
    """With several lanes, where no layer normalises over a batch."""
    found = run_ranks(_against_plain, 1, str(tmp_path / "run"), name, lanes)
    [(mine, plain, seen, expected)] = found
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-6)
    assert seen == pytest.approx(expected, rel=1e-5)


def _prepared(run: samestep.Run, *more: nn.Module) -> tuple[Any, ...]:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return run.prepare(model, optimizer, loader(drop_last=True), *more)


def _second(folder: str, kind: str) -> None:
    with samestep.start(**_keys(folder)) as run:
        others: dict[str, Any] = {
            "shorter": DataLoader(loader().dataset, batch_size=48, drop_last=True),
            "no lanes": DataLoader(loader().dataset, batch_size=9),
            "dropped first": loader(drop_last=True),
        }
        model, optimizer, data, more = _prepared(run, others.get(kind, loader()))
        for _ in run.epochs():
            pairs: dict[str, Any] = {
                "second first": lambda: zip(more, data, strict=True),
                "twice": lambda: zip(data, _twice(more), strict=False),
                "dropped first": lambda: zip(more, data, strict=False),
            }
            batches = pairs.get(kind, lambda: zip(data, more, strict=False))()
            model.train()
            for (x, y), _ in batches:
                optimizer.zero_grad()
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()


def _twice(data: Any) -> Iterator[Any]:
    batches = iter(data)
    while True:
        yield next(batches), next(batches)


def _tails(folder: str) -> str:
    """Two loaders whose last batches leave the same ranks without samples."""
    with samestep.start(**_keys(folder, lanes=8)) as run:
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, data, more = run.prepare(model, optimizer, loader(), loader())
        for _ in run.epochs():
            for (x, y), (u, _) in zip(data, more, strict=True):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x.flatten(1)), y) + model(u.flatten(1)).square().mean()
                loss.backward()
                optimizer.step()
        return digest(model)


@pytest.mark.variation("test_streams_that_end_and_losses_with_names: of two loaders")
def test_two_loaders_that_leave_a_rank_without_samples(tmp_path: Path) -> None:
    [expected] = run_ranks(_tails, 1, str(tmp_path / "1"))
    for world in (2, 4):
        assert run_ranks(_tails, world, str(tmp_path / str(world))) == [expected] * world


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shorter", "epoch 0 was left after step"),
        ("no lanes", "the batch of a second loader, 9, is cut into lanes, too"),
        ("dropped first", "in zip(...) behind the first DataLoader of run.prepare"),
        ("second first", "in zip(...) the first DataLoader of run.prepare comes first"),
        ("twice", "a second loader was read twice in one step"),
    ],
)
def test_a_second_loader_that_no_lane_could_share_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(StepError, match=re.escape(words)):
        _second(str(tmp_path), kind)


def _evaluating(folder: str) -> list[float]:
    """A loader is for validation where a loop over it stands in the body of another."""
    seen = []
    with samestep.start(**_keys(folder)) as run:
        model, optimizer, data, valid = _prepared(run, DataLoader(loader().dataset, batch_size=9))  # type: ignore[arg-type]
        for _ in run.epochs():
            for x, y in data:
                optimizer.zero_grad()
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                right = [(model(a).argmax(1) == b).sum() for a, b in valid]
                seen.append(float(run.reduce(sum(right, torch.zeros(())))))
    return seen


def _looks(folder: str) -> None:
    with samestep.start(**_keys(folder)) as run:
        model, optimizer, data, valid = _prepared(run, DataLoader(loader().dataset, batch_size=9))  # type: ignore[arg-type]
        for _ in run.epochs():
            for x, y in data:
                fixed, _ = next(iter(valid))
                optimizer.zero_grad()
                run.backward(F.cross_entropy(model(x), y) + fixed.mean())
                optimizer.step()


def test_a_batch_of_validation_data_that_trains_is_warned_about(tmp_path: Path) -> None:
    _looks(str(tmp_path))
    said = (tmp_path / "logs" / "rank-0.log").read_text()
    assert said.count("a loop over validation data was left before its end") == 1


def test_an_evaluation_in_the_body_of_a_loop(tmp_path: Path) -> None:
    [expected] = run_ranks(_evaluating, 1, str(tmp_path / "1"))
    assert len(set(expected)) > 1
    assert run_ranks(_evaluating, 2, str(tmp_path / "2")) == [expected] * 2


def _left(folder: str, kind: str) -> tuple[str, int, list[int]]:
    """A loop that looks at a batch before it trains, and is left in the middle."""
    numbers = []
    with samestep.start(**_keys(folder, epochs=1)) as run:
        model, optimizer, data = _prepared(run)
        if kind == "peeks":
            x, _ = next(iter(data))
            numbers.append(x.size(0))
        for _ in run.epochs():
            for i, (x, y) in enumerate(data):
                if kind == "leaves at the top" and i == 2:
                    break
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if kind == "leaves after backward" and i == 1:
                    optimizer.step()
                    break
                optimizer.step()
                numbers.append(i)
            if kind != "peeks":
                break
        step = run.start_step
    return digest(model), step, numbers


@pytest.mark.parametrize("kind", variations(["peeks", "leaves at the top", "leaves after backward"], kept=["peeks"]))
def test_loops_may_look_at_a_batch_and_be_left(tmp_path: Path, kind: str) -> None:
    [expected] = run_ranks(_left, 1, str(tmp_path / "1"), kind)
    assert run_ranks(_left, 4, str(tmp_path / "4"), kind) == [expected] * 4
    steps = SAMPLES // BATCH
    assert expected[2] == ([3, *range(steps)] if kind == "peeks" else [0, 1][: len(expected[2])])
    saved = sorted((tmp_path / "4" / "checkpoints").glob("step-*"))
    assert saved[-1].name.endswith("4" if kind == "peeks" else "2")


def _evaluates(folder: str) -> list[Any]:
    """In the body: an evaluation, a loader of its own, a gather of rows, a function that needs arrays."""
    found: list[Any] = []
    with samestep.start(**_keys(folder, epochs=1)) as run:
        valid = DataLoader(loader().dataset, batch_size=10)
        model, optimizer, data, valid = _prepared(run, valid)  # type: ignore[arg-type]
        other = DataLoader(loader().dataset, batch_size=30, shuffle=True)
        for i, (x, y) in run.enumerate(data):
            optimizer.zero_grad()
            out = model(x)
            weights = run.each_lane(_by_numpy, y)
            loss = (F.cross_entropy(out, y, reduction="none") * weights).mean()
            run.backward(loss)
            optimizer.step()
            if i == 1:
                right = sum(int((model(a).argmax(1) == b).sum()) for a, b in valid)
                found += [run.reduce(right), len(next(iter(other))[0]), random.random()]
                found.append(torch.rand(3, generator=torch.Generator().manual_seed(1)).tolist())
            found.append(run.gather(y).tolist())
            found.append(float(run.mean(loss)) - loss.item())
        found.append(digest(model))
    return found


def _by_numpy(y: Tensor) -> Tensor:
    return torch.from_numpy(1.0 / (1.0 + y.numpy())).float()


def test_a_body_may_evaluate_and_gather(tmp_path: Path) -> None:
    [expected] = run_ranks(_evaluates, 1, str(tmp_path / "1"))
    assert run_ranks(_evaluates, 4, str(tmp_path / "4")) == [expected] * 4
    gathered = [row for row in expected if isinstance(row, list) and len(row) == BATCH]
    assert len(gathered) == SAMPLES // BATCH
    assert max(abs(value) for value in expected if isinstance(value, float) and abs(value) < 1e-3) < 1e-6


def _misuse(folder: str, kind: str) -> str:
    values: dict[str, Any] = {"same": "rounding"} if kind == "lanes by DDP" else {}
    try:
        with samestep.start(**_keys(folder, **values)) as run:
            model, optimizer, data = _prepared(run)
            if kind == "outside":
                run.backward(torch.zeros(()))
            for _ in run.epochs() if kind != "no epochs" else [0]:
                for x, y in data:
                    _body(kind, run, model, optimizer, x, y)
    except StepError as error:
        return str(error)
    return "nothing was refused"


def _body(kind: str, run: samestep.Run, model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    other = nn.BatchNorm1d(64)
    lines: dict[str, Any] = {
        "step first": optimizer.step,
        "item": loss.item,
        "a branch": lambda: bool(loss > 1),
        "numpy": lambda: y.numpy(),
        "a list": lambda: y.tolist(),
        "a sum of ranks": lambda: run.reduce(loss),
        "no value of lanes": lambda: run.sum(torch.ones(())),
        "a loss of no lane": lambda: run.backward(torch.ones((), requires_grad=True)),
        "unknown BatchNorm": lambda: other(x.flatten(1)),
        "saved": lambda: torch.save(loss, io.BytesIO()),
        "weights by lanes": lambda: model[1].weight.data.sub_(x.sum()),
        "a closure": lambda: (run.backward(loss), optimizer.step(lambda: 0.0)),
    }
    if kind == "no backward pass":
        return
    if kind == "a hook":
        kept: list[Tensor] = []
        model[1].register_forward_hook(lambda _, __, out: kept.append(out))
        loss = F.cross_entropy(model(x), y) + kept[-1].mean()
    if kind in lines:
        lines[kind]()
    run.backward(loss)
    optimizer.step()


REFUSED = {
    "outside": "run.backward belongs inside a loop over the training loader",
    "no epochs": "has the steps of all 2 epochs if nobody asks for epochs",
    "step first": "SGD.step() came before the first backward pass of step 0",
    "item": "item() of LaneTensor(4 lanes, each []): each lane has its own value",
    "a branch": "run.sum(value) or run.mean(value)",
    "numpy": "the values of LaneTensor(4 lanes, each [3])",
    "a list": "the values of LaneTensor(4 lanes, each [3])",
    "a sum of ranks": "run.sum and run.mean take values of lanes",
    "no value of lanes": "run.sum got a Tensor that is no value of lanes",
    "a loss of no lane": "run.backward got a loss that is no value of lanes",
    "unknown BatchNorm": "give run.prepare every module",
    "saved": "cannot be saved or sent",
    "a closure": "SGD.step got a closure",
    "no backward pass": "x.size(0) is the size of a lane (3), not of the global batch (24)",
    "a hook": "it is the last lane's alone. Let the module return it",
    "weights by lanes": "sub_ changes an ordinary tensor by values of lanes",
    "lanes by DDP": "same: rounding runs a rank's 4 lanes one after the other",
}


REFUSED_IN_CI = ["outside", "step first", "item", "a sum of ranks", "a closure", "weights by lanes"]


@pytest.mark.parametrize("kind", variations(REFUSED, kept=REFUSED_IN_CI))
def test_what_would_differ_among_ranks_is_refused(kind: str, tmp_path: Path) -> None:
    for said in run_ranks(_misuse, 2, str(tmp_path / "run"), kind):
        assert REFUSED[kind] in said


@pytest.mark.parametrize(("same", "lanes"), [("rounding", 2), ("samples", 8)])
def test_other_levels_train_the_same_up_to_rounding(tmp_path: Path, same: str, lanes: int) -> None:
    """Also in the last batch of an epoch, in which one of two ranks has no samples."""
    [(_, expected)] = run_ranks(partial(train_body, lanes=2), 1, str(tmp_path / "bits"), "summed")
    for _, seen in run_ranks(partial(train_body, same=same, lanes=lanes), 2, str(tmp_path / same), "summed"):
        assert seen == pytest.approx(expected, rel=1e-5)


class Layers(nn.Module):
    """So many small layers that lanes cost what they are cut into."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)), nn.Linear(64, 10))
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Any:
        return {"logits": self.layers(self.drop(self.norm(x.flatten(1))))}


def _measured(folder: str, looks: bool, budget: float = 60.0) -> tuple[str, str, list[int]]:
    from samestep.step import lane_cost

    real, timed = lane_cost.LaneCost._once, []

    def once(self: Any, module: nn.Module, rows: Any, params: Any) -> float:
        real(self, module, rows, params)  # its passes are real, its clock is not
        timed.append(len(rows))
        return 1.0 + 0.2 * len(rows)

    lane_cost.LaneCost._once = once  # type: ignore[method-assign]
    lane_cost._BUDGET = budget
    if not looks:
        lane_cost._AT_STEP = 10**9
    with samestep.start(**_keys(folder, epochs=2)) as run:
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, data = run.prepare(model, optimizer, loader(drop_last=True))
        for _ in run.epochs():
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x)["logits"], y).backward()
                optimizer.step()
    return digest(model), (Path(folder) / "logs" / "rank-0.log").read_text(), timed


def test_what_lanes_cost_is_measured_once_and_changes_nothing(tmp_path: Path) -> None:
    [(state, said, timed)] = run_ranks(_measured, 1, str(tmp_path / "looks"), True)
    [(expected, quiet, none)] = run_ranks(_measured, 1, str(tmp_path / "not"), False)
    [(again, short, few)] = run_ranks(_measured, 1, str(tmp_path / "slow"), True, 0.0)
    assert state == expected == again
    assert (timed, none, few) == ([1, 8, 2, 4] * 3, [], [1, 8]), "a slow model is timed once"
    assert "takes 2.2 times as long" in short
    assert said.count("8 lanes: a forward and backward pass of Layers takes 2.2 times as long") == 1
    assert "lanes=1 would cost 1.00" in said
    assert "takes" not in quiet
    assert "BatchNorm normalises over a lane's 3 samples" in said


def _warned(folder: str, drop_last: bool) -> str:
    with samestep.start(**_keys(folder, epochs=1)) as run:
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = DataLoader(loader().dataset, batch_size=BATCH, drop_last=drop_last)
        model, optimizer, data = run.prepare(model, optimizer, data)
        for _ in run.epochs():
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x)["logits"], y).backward()
                optimizer.step()
                if run.step == 1:
                    break
            break
    return (Path(folder) / "logs" / "rank-0.log").read_text()


def test_a_tail_that_the_loader_drops_is_not_warned_of(tmp_path: Path) -> None:
    """106 samples in lanes of three leave one alone, which BatchNorm cannot normalise."""
    [dropped] = run_ranks(_warned, 1, str(tmp_path / "dropped"), True)
    [kept] = run_ranks(_warned, 1, str(tmp_path / "kept"), False)
    assert "Warning" not in dropped
    assert "the last lane of an epoch has 1 sample" in kept
