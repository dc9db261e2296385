"""`distributed.shard: weights`: weights gathered block by block, with the bits of the unsharded run."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samestep
from samestep.config.optim import EmaConfig
from samestep.errors import NonFiniteLoss, StepError, Stopped, TaskError
from samestep.optim.weight_average import Ema
from samestep.reduce import exchange, owned_bucket
from samestep.reduce.owners import is_held
from samestep.train.callbacks import GradientNorms
from tests.distributed.interrupting import finish, go_on
from tests.distributed.running import rows_of, train
from tests.distributed.test_sharding import _keys
from tests.ranks import answers_of_ranks, run_ranks
from tests.variations import variations

SAMPLES, BATCH = 104, 24
"""The last batch has eight samples: of eight lanes some are empty and one is shorter."""


class Block(nn.Module):
    """BatchNorm, dropout and a type of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (nn.BatchNorm1d(width), nn.Linear(width, 48), nn.Linear(48, width))
        self.shift = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(self.up(self.norm(x)).relu(), 0.2, self.training)
        return x + self.down(inner) + self.shift.float()


class Net(nn.Module):
    """Blocks of which one runs twice, between layers that are in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(8, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.skips: tuple[int, ...] = ()
        up = self.blocks[0].up  # type: ignore[union-attr]
        up.weight.data = up.weight.data.t().contiguous().t()  # in another order in memory

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in (0, 1, 1, 2):
            if number not in self.skips:
                x = self.blocks[number](x)
        return self.out(x)


def _tensors(seed: int, samples: int) -> TensorDataset:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=made)
    return TensorDataset(x, torch.randint(10, (samples,), generator=made))


def _digest(run: samestep.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.blake2b(digest_size=8)
    with run.whole_state():
        if run.is_main:
            states = sorted(optimizer.state_dict()["state"].items())
            state = [model.state_dict(), *(of_param for _, of_param in states)]
            for value in (value for part in state for value in part.values()):
                found.update(torch.as_tensor(value).cpu().numpy().tobytes())
    return found.hexdigest()


def train_blocks(folder: str, shard: str, stop: int | None = None, more: Any = None) -> tuple[str, list[float], float]:
    """Train; returns a digest of rank 0's weights and states, what was measured, and this rank's share of weights."""
    values = dict(more or {})
    try:
        with samestep.start(**_keys(folder, shard, **values)) as run:
            if stop is not None:
                run.pause_after(stop)
            is_known = "global_batch" in values  # else the DataLoader's, of which the run knows later
            with torch.device("meta" if is_known and run.start_step else "cpu"):
                model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            data = DataLoader(_tensors(3, SAMPLES), batch_size=BATCH, shuffle=True)
            model, optimizer, data = run.prepare(model, optimizer, data)
            params, seen = list(model.parameters()), []
            for _ in run.epochs():
                for step in run.steps(data):
                    loss = step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
                    seen.append(loss.item())
                seen += _evaluated(run, model)
            held = sum(param.numel() for param in params if is_held(param))
            return _digest(run, model, optimizer), seen, held / sum(p.numel() for p in params)
    except Stopped:
        return "stopped", [], 0.0


def _evaluated(run: samestep.Run, model: nn.Module) -> list[float]:
    """A loop over validation data that calls the model twice for each batch; 13 batches for 8 lanes."""
    found = []
    for x, y in run.eval_batches(_tensors(4, 37)):
        found.append((model(x) + model(x.flip(1))).argmax(1) == y)
    return [float(run.gather(found).sum())]


CASES: dict[str, dict[str, Any]] = {
    "plainly": {},
    "bf16": {"precision": "bf16", "memory": {"checkpoint": ["blocks.*"]}},
    "named blocks": {"distributed": {"shard_blocks": ["blocks.1", "first"]}, "on_nonfinite": "skip"},
    "compiled": {"speed": {"compile": "blocks"}, "memory": {"checkpoint": ["blocks.*"]}},
}


@pytest.mark.parametrize("case", variations(CASES, kept=["bf16"]))
def test_weights_by_blocks_are_the_same_run_at_any_size(tmp_path: Path, case: str) -> None:
    if case == "compiled" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler here")
    alone = {**CASES[case], "distributed": {}}
    [expected] = run_ranks(train_blocks, 1, str(tmp_path / "1"), "none", None, alone)
    for world in (4,) if case == "compiled" else (2, 3, 4):
        answers = run_ranks(train_blocks, world, str(tmp_path / str(world)), "weights", None, CASES[case])
        assert answers[0][:2] == expected[:2]
        assert [seen for _, seen, _ in answers] == [expected[1]] * world
        assert sum(share for _, _, share in answers) == pytest.approx(1.0), "between steps"


def test_a_run_resumes_in_any_mode(tmp_path: Path) -> None:
    [expected] = run_ranks(train_blocks, 1, str(tmp_path / "whole"), "none")
    folder, known = str(tmp_path / "parts"), {"global_batch": BATCH}
    for world, shard, stop in ((4, "weights", 3), (1, "none", 5), (3, "optimizer", 6), (2, "none", 8)):
        run_ranks(train_blocks, world, folder, shard, stop, known)
        _check_parts(tmp_path / "parts", stop, world, shard)
    answers = run_ranks(train_blocks, 3, folder, "weights", None, known)
    assert answers[0][0] == expected[0]


def test_a_task_builds_its_model_on_the_meta_device(tmp_path: Path) -> None:
    distributed = {"shard": "weights"}
    whole = train(tmp_path, 1, "OnMeta", epochs=4)
    folder = tmp_path / "parts"
    said = go_on(folder, 4, "OnMeta", at=5, rank=2, how="SIGTERM", epochs=4, distributed=distributed)
    assert all(not ok and "Stopped" in text for ok, text in said), said
    ended = finish(folder, 3, "OnMeta", epochs=4, distributed=distributed)
    assert ended.record.state_hash == whole.record.state_hash


def _loop(folder: str, shard: str, stop: int | None = None) -> tuple[str, list[float]]:
    """A loop of one's own: two calls of the model per step, updates of two steps, clipped by hand."""
    seen: list[float] = []
    try:
        with samestep.start(**_keys(folder, shard)) as run:
            if stop is not None:
                run.pause_after(stop)
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            run.add_listener(GradientNorms(run, every=1))
            data = DataLoader(_tensors(3, SAMPLES), batch_size=BATCH, shuffle=True)
            model, optimizer, data = run.prepare(model, optimizer, data)
            for _ in run.epochs():
                labels: list[Tensor] = []
                for x, y in data:
                    labels.append(y)
                    with torch.no_grad():
                        teacher = model(x.flip(1)).softmax(1)
                    out = model(x)
                    loss = F.cross_entropy(out, y) + F.cross_entropy(out, teacher)
                    loss.backward()
                    seen.append(loss.item())
                    if run.step % 2:
                        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                        seen.append(float(norm))
                        optimizer.step()
                        optimizer.zero_grad()
                seen += [*_evaluated(run, model), *run.gather(labels).tolist()]
            return _digest(run, model, optimizer), seen
    except Stopped:
        return "stopped", []


def test_a_loop_of_ones_own_is_the_same_run(tmp_path: Path) -> None:
    [expected] = run_ranks(_loop, 1, str(tmp_path / "1"), "none")
    answers = run_ranks(_loop, 4, str(tmp_path / "4"), "weights")
    assert answers[0] == expected
    assert [seen for _, seen in answers] == [expected[1]] * 4
    assert _gradient_norms(tmp_path / "4") == _gradient_norms(tmp_path / "1")
    run_ranks(_loop, 3, str(tmp_path / "parts"), "weights", 3)
    run_ranks(_loop, 2, str(tmp_path / "parts"), "optimizer", 6)
    assert run_ranks(_loop, 3, str(tmp_path / "parts"), "weights")[0][0] == expected[0]


def _gradient_norms(run: Path) -> list[Any]:
    """What a listener that reads gradients has written."""
    found = [{k: v for k, v in row.items() if "grad_norm" in k} for row in rows_of(run)]
    assert any(found)
    return found


def _check_parts(run: Path, step: int, world: int, shard: str) -> None:
    """Every rank has written what it owns, and only that."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    weights = [load_file(path) for path in sorted(checkpoint.glob("model*.safetensors"))]
    assert len(weights) == (world if shard == "weights" else 1)
    names = [name for part in weights for name in part]
    assert len(names) == len(set(names)), "each in one part"
    assert set(names) == load_file(run / "model.safetensors").keys()
    states = [path.stat().st_size for path in checkpoint.glob("training*.pt")]
    assert len(states) == (1 if shard == "none" else world)
    assert max(states) < (0.8 if world > 1 and shard != "none" else 1.1) * sum(states)


def _refused(folder: str, kind: str) -> str:
    try:
        _do(folder, kind)
    except (TaskError, StepError, NonFiniteLoss) as error:
        return str(error)
    return "nothing was refused"


def _do(folder: str, kind: str) -> None:
    with samestep.start(**_keys(folder, "weights")) as run:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        data: Any = DataLoader(_tensors(3, SAMPLES), batch_size=BATCH)
        early = Ema(model, EmaConfig(decay=0.9), None, run.context.collectives)
        model, optimizer, data = run.prepare(model, optimizer, data)
        if kind == "iterable data":
            data = samestep.Strided(list(_tensors(3, SAMPLES)))
        if kind == "a gradient":
            for x, _ in data:
                torch.autograd.grad(model(x.requires_grad_()).sum(), x)
        if kind == "a penalty":
            for x, _ in data:
                penalty = sum(w.square().sum() for w in model.parameters())
                (model(x).mean() + penalty).backward()
        if kind in ("a branch", "an average", "an earlier batch"):
            _own_loop(run, kind, model, data)
        if kind == "no lanes":
            with run.no_lanes():
                model(torch.zeros(2, 8))
        for step in run.steps(data):
            if kind == "other blocks":
                model.skips = (run.context.rank,)
            step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
            if kind == "a change":
                torch._foreach_mul_([weight.data for weight in model.parameters()], 0.9)
            if kind == "outside":
                model(torch.zeros(2, 8))
            if kind == "its state":
                model.state_dict()
            if kind == "rows of a step":
                run.gather([torch.zeros(3)])
            if kind == "a left loop":
                for _ in run.eval_batches(_tensors(4, 37)):
                    break
            if kind == "an early average":
                run.register("slow", early)


def _read_no_numbers(x: Tensor, weight: Tensor) -> None:
    """Lines that name a weight, or something of odd memory, and read no weight's numbers."""
    assert x.to(weight).dtype == x.type_as(weight).dtype == weight.detach().dtype
    assert torch.zeros_like(weight).sum() == weight.new_zeros(3).sum()
    assert torch.eye(3).to_sparse().to_dense().sum() == 3
    assert torch.arange(17, dtype=torch.uint8)[2].item() == 2
    assert torch.ones(17, dtype=torch.bool)[3]


def _own_loop(run: samestep.Run, kind: str, model: Any, data: Any) -> None:
    weights = list(model.parameters())
    earlier = None
    slow = [torch.zeros(weight.shape) for weight in weights]
    for x, _ in (batch for _ in run.epochs() for batch in data):
        assert all(w.requires_grad and w.numel() == w.size().numel() for w in weights)
        _read_no_numbers(x, weights[0])
        if kind == "an earlier batch":
            out = model(x if earlier is None else earlier)
            earlier = x
        else:
            out = model(x)
        out.mean().backward()
        if kind == "a branch" and max(weight.norm() for weight in weights) > 1:
            raise AssertionError("a weight was read")
        for average, weight in zip(slow, weights, strict=True) if kind == "an average" else ():
            average.lerp_(weight.data, 0.1)


@pytest.mark.parametrize(
    ("kind", "said"),
    variations(
        [
            ("a branch", "norm of a weight in the loop's body"),
            ("an average", "lerp_ of a weight in the loop's body"),
            ("an earlier batch", "what the loader yielded in another step"),
            ("a gradient", "torch.autograd.grad with distributed.shard: weights"),
            ("a change", "a weight was changed that another rank owns"),
            ("a penalty", "square of a weight in the loop's body"),
            ("no lanes", "ran outside of a training step or an evaluation"),
            ("iterable data", "which iterable data does not tell"),
            ("outside", "ran outside of a training step or an evaluation"),
            ("its state", "this rank holds only some of its weights"),
            ("rows of a step", "run.gather of a step's rows needs ranks with consecutive lanes"),
            ("a left loop", "was left before its end, or two of them run at once"),
            ("an early average", "an average of the weights was made before run.prepare"),
        ],
        kept=["a gradient", "a penalty", "outside", "its state"],
    ),
)
def test_what_cannot_be_gathered_is_refused(tmp_path: Path, kind: str, said: str) -> None:
    answers = run_ranks(_refused, 2, str(tmp_path / "run"), kind)
    assert [said in answer for answer in answers] == [True, True], answers


def test_lanes_that_run_other_blocks_are_refused(tmp_path: Path) -> None:
    """Rank 0 leaves out block 0, and rank 1 block 1: they would take one block's weights for another's."""
    answers = answers_of_ranks(_refused, 2, str(tmp_path / "run"), "other blocks", seconds=60)
    assert "a lane needs blocks.0 where another one needed blocks.1" in answers[1][1]


class Follower(samestep.RunListener):
    """A slow copy of the weights, made after each update."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.slow = model, [torch.zeros_like(p) for p in model.parameters()]

    def after_update(self, step: samestep.Step) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self.slow, list(self._model.parameters()), 0.1)


def _followed(folder: str, shard: str) -> float:
    with samestep.start(**_keys(folder, shard)) as run:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        data = DataLoader(_tensors(3, SAMPLES), batch_size=BATCH)
        follower = Follower(model)
        model, optimizer, data = run.prepare(model, optimizer, data)
        run.add_listener(follower)
        for step in run.steps(data):
            step.train(lambda batch: F.cross_entropy(model(batch.x), batch.y))
        return sum(float(slow.double().sum()) for slow in follower.slow)


def test_what_follows_an_update_has_all_weights(tmp_path: Path) -> None:
    [expected] = run_ranks(_followed, 1, str(tmp_path / "1"), "none")
    assert run_ranks(_followed, 3, str(tmp_path / "3"), "weights") == [expected] * 3


def _adversarial(folder: str, shard: str) -> tuple[list[float], str]:
    """A step that differentiates by its input first, then runs the model again."""
    with samestep.start(**_keys(folder, shard)) as run:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        data = DataLoader(_tensors(3, SAMPLES), batch_size=BATCH)
        model, optimizer, data = run.prepare(model, optimizer, data)

        def loss(batch: Any) -> Tensor:
            x = batch.x.clone().requires_grad_()
            (direction,) = torch.autograd.grad(F.cross_entropy(model(x), batch.y), x)
            return F.cross_entropy(model((x + 0.1 * direction.sign()).detach()), batch.y)

        seen = [step.train(loss).item() for step in run.steps(data)]
        return seen, _digest(run, model, optimizer)


@pytest.mark.variation("test_weights_by_blocks_are_the_same_run_at_any_size: with blocks that run twice")
def test_a_step_may_run_the_model_twice(tmp_path: Path) -> None:
    [expected] = run_ranks(_adversarial, 1, str(tmp_path / "1"), "none")
    assert run_ranks(_adversarial, 3, str(tmp_path / "3"), "weights")[0] == expected


def _bytes_sent(folder: str, shard: str, world: int, by_slices: bool = False) -> tuple[float, float, float]:
    """Return the bytes that this rank sends per step, those of all parameters, and of the last block."""
    sent = 0
    if by_slices:
        owned_bucket._LEAST_BYTES, owned_bucket._WORTH_SLICES = 0, 0.0
    by_group = exchange._by_group

    def counting(messages: Sequence[exchange.Message], tag: int, group: dist.ProcessGroup) -> exchange.Pending:
        nonlocal sent
        sent += sum(tensor.nbytes for call, tensor, _ in messages if call is dist.isend)
        return by_group(messages, tag, group)

    exchange._by_group = counting
    try:
        keys = _keys(folder, shard, lanes=world, epochs=None, steps=6)
        with samestep.start(**keys) as run:
            model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)))
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            data = DataLoader(TensorDataset(torch.randn(96, 64)), batch_size=12)
            model, optimizer, data = run.prepare(model, optimizer, data)
            at: list[int] = []
            for step in run.steps(data):
                at.append(sent)
                step.train(lambda batch: model(batch.data[0]).square().mean())
            each = [param.nbytes for param in model.parameters()]
            return (at[5] - at[2]) / 3, sum(each), sum(each[-2:])
    finally:
        exchange._by_group = by_group


def test_sums_by_slices_send_a_part_of_one_rank_more(tmp_path: Path) -> None:
    world, sent = 4, {}
    for by_slices in (False, True):
        folder = str(tmp_path / str(by_slices))
        answers = run_ranks(_bytes_sent, world, folder, "weights", world, by_slices)
        sent[by_slices] = sum(sent for sent, _, _ in answers)
    whole = answers[0][1]
    # Each rank passes on its even slice, of which it owns 1 / W.
    assert sent[True] - sent[False] == pytest.approx(whole * (world - 1) / world, rel=0.15)


def _blocks_by_slices(folder: str, shard: str, stop: int | None = None) -> tuple[str, list[float]]:
    owned_bucket._LEAST_BYTES, owned_bucket._WORTH_SLICES = 0, 0.0
    return train_blocks(folder, shard, stop)[:2]


@pytest.mark.variation(
    "test_weights_by_blocks_are_the_same_run_at_any_size: in slices, as test_sums_by_slices_are_the_same_run has them"
)
def test_blocks_by_slices_are_the_same_run(tmp_path: Path) -> None:
    [expected] = run_ranks(_blocks_by_slices, 1, str(tmp_path / "1"), "none")
    for world in (2, 3, 4):
        folder = str(tmp_path / str(world))
        answers = run_ranks(_blocks_by_slices, world, folder, "weights")
        assert answers[0] == expected
        assert [seen for _, seen in answers] == [expected[1]] * world


@pytest.mark.parametrize("world", variations([3, 4], kept=[4]))
def test_as_many_bytes_are_sent_as_predicted(tmp_path: Path, world: int) -> None:
    found = {}
    for shard in ("none", "optimizer", "weights"):
        answers = run_ranks(_bytes_sent, world, str(tmp_path / shard), shard, world)
        _, whole, last = answers[0]
        found[shard] = sum(sent for sent, _, _ in answers)
    expected = {
        "none": 2 * whole * (world - 1),
        "optimizer": 2 * whole * (world - 1),
        # Gathered forward and backward, but for the last block, and sent to owners.
        "weights": (3 * whole - last) * (world - 1),
    }
    assert found == pytest.approx(expected, rel=0.02)
