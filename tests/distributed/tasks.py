"""Small tasks, each with one thing in it that could make a run depend on its ranks."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import samestep
from samestep import LaneBatch, RunContext, Schedule, Task, orders
from samestep.environment.launch import detect_launch

if TYPE_CHECKING:
    from torchmetrics import Metric

CLASSES = 4
SAMPLES = 90
"""With a global batch of 32: two whole steps and a tail of 26 samples."""


def points(samples: int = SAMPLES, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 1, 6, 6, generator=generator)
    y = (x.sum(dim=(1, 2, 3)) * 0.5).round().long() % CLASSES
    return x, y


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments with draws from python, numpy and torch."""

    def __init__(self, samples: int) -> None:
        self.x, self.y = points(samples)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index] * (0.9 + 0.2 * random.random()) + float(np.random.normal()) * 0.05
        return x + 0.05 * torch.randn_like(x), self.y[index]


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(6 * 36, 24)
        self.last = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        return self.last(self.dropout(F.gelu(self.hidden(x))))


class Everything(Task):
    """BatchNorm, dropout, augmentation, an uneven tail, metrics; clipping by the config."""

    def __init__(self, samples: int = SAMPLES, optimizer: str = "adamw", dropout: float = 0.3) -> None:
        self.samples, self.kind, self.p = samples, optimizer, dropout

    def model(self) -> nn.Module:
        return Net(self.p)

    def train_data(self) -> Any:
        return Noisy(self.samples)

    def valid_data(self) -> Any:
        return TensorDataset(*points(37, seed=4))

    def optimizers(self, model: nn.Module) -> Any:
        if self.kind == "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        if self.kind == "fused momentum":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=self.kind == "fused")

    def schedules(self, optimizers: Any, steps: int | None) -> Any:
        return [
            Schedule(torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.97)),
            Schedule(torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.9), every="epoch"),
        ]

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)

    def metrics(self) -> Mapping[str, Metric]:
        # Here, since it takes as long as torch: tests that evaluate nothing do without it.
        from torchmetrics import MeanSquaredError, SumMetric
        from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

        return {
            "f1": MulticlassF1Score(CLASSES, average="macro"),
            "auroc": MulticlassAUROC(CLASSES),  # keeps every score: a list state
            "brier": MeanSquaredError(),
            "samples": SumMetric(),  # would be some times too large if ranks added it up again
        }

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Metric]) -> tuple[Tensor, int]:
        logits = model(batch.x)
        metrics["f1"].update(logits, batch.y)
        metrics["samples"].update(len(batch))
        metrics["auroc"].update(logits.softmax(1), batch.y)
        metrics["brier"].update(logits.softmax(1), F.one_hot(batch.y, CLASSES).float())
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)


class OnMeta(Everything):
    """Whose model has no memory when a run resumes, until the checkpoint fills it."""

    meta_resume = True

    def model(self) -> nn.Module:
        model = super().model()
        wanted = torch.get_default_device().type
        assert all(param.device.type == wanted for param in model.parameters())
        return model


class Exploding(torch.autograd.Function):
    """Does nothing forward, and gives an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float("inf")


class Overflowing(Everything):
    """One sample, and so one lane of one rank once an epoch, overflows in backward."""

    def __init__(self, sample: int = 17, **others: Any) -> None:
        super().__init__(**others)
        self.sample = sample

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        logits = model(batch.x)
        if self.sample in batch.ids:
            logits = Exploding.apply(logits)
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)


class Cramped(Everything):
    """More than so many samples at once do not fit into the device, as it pretends."""

    def __init__(self, fits: int = 2, **others: Any) -> None:
        super().__init__(**others)
        self.fits = fits

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        if len(batch) > self.fits:
            raise torch.OutOfMemoryError("pretended")
        return super().loss(model, batch)


class Balanced(Everything):
    """Samples drawn with replacement, every class equally often."""

    def order(self, dataset: Any) -> Any:
        return orders.class_balanced(dataset.y.tolist())


class TiedNet(nn.Module):
    """One embedding used at both ends, a frozen layer, and a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.never = nn.Linear(8, 8)
        self.mix = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.drop(torch.tanh(self.mix(self.frozen(self.embed(tokens))))))


class Sentences(Dataset[Tensor]):
    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> Tensor:
        length = 2 + (index * 7) % 9
        return (torch.arange(length) * (index % 5 + 1) + index) % 10 + 1


class Tokens(Task):
    """Next-token loss over sentences of different lengths; tied and frozen weights."""

    def model(self) -> nn.Module:
        return TiedNet()

    def train_data(self) -> Any:
        return Sentences()

    def collate(self, samples: list[Any]) -> Any:
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Tensor]:
        logits, targets = model(batch.data[:, :-1]), batch.data[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        return loss, (targets != 0).sum()


class PaddedTokens(Tokens):
    """All batches have one shape."""

    def collate(self, samples: list[Any]) -> Any:
        longest = torch.zeros(10, dtype=torch.int64)
        return super().collate([*samples, longest])[:-1]


class CenterLoss(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return ((out - self.centers[y]) ** 2).sum()


class TwoOptimizers(Everything):
    """One optimizer for the model, another for the loss's own weights."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.center = CenterLoss()

    def extra_modules(self) -> list[nn.Module]:
        return [self.center]

    def optimizers(self, model: nn.Module) -> Any:
        return [
            torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
            torch.optim.Adam(self.center.parameters(), lr=0.05),
        ]

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        out = model(batch.x)
        loss = F.cross_entropy(out, batch.y, reduction="sum") + 0.1 * self.center(out, batch.y)
        return loss, len(batch)


class Named(TwoOptimizers):
    """Optimizers and schedules are the config's; the loss has weights of its own."""

    optimizers = Task.optimizers
    schedules = Task.schedules


class Sometimes(Everything):
    """A layer that only some lanes use, by what is in their batch."""

    def model(self) -> nn.Module:
        model = Net(self.p)
        model.extra = nn.Linear(CLASSES, CLASSES)
        return model

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        net = getattr(model, "module", model)
        out = model(batch.x)
        if int(batch.y[0]) == 1:
            out = net.extra(out)
        return F.cross_entropy(out, batch.y, reduction="sum"), len(batch)


class Stream:
    """Shards itself by lane; the lanes' streams have different lengths and draw noise."""

    def __init__(self, noise: float, draw: Any = points) -> None:
        self.noise, self.draw = noise, draw

    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> Iterator[Any]:
        x, y = self.draw(SAMPLES + 7 * epoch)
        for index in range(lane, len(x), lanes):
            if index % 11 != lane % 3:
                yield x[index] + self.noise * torch.randn(()), y[index]


class Streamed(Everything):
    def __init__(self, noise: float = 0.1) -> None:
        super().__init__()
        self.noise = noise

    def train_data(self) -> Any:
        return Stream(self.noise)

    def schedules(self, optimizers: Any, steps: int | None) -> Any:
        return ()


class HuggingFace(Streamed):
    def valid_data(self) -> Any:
        return None

    def train_data(self) -> Any:
        import datasets

        x, y = points()
        rows = {"x": x.flatten(1).tolist(), "y": y.tolist()}
        data = datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)
        return data.shuffle(seed=5, buffer_size=16)

    def collate(self, samples: list[Any]) -> Any:
        x = torch.tensor([sample["x"] for sample in samples]).view(-1, 1, 6, 6)
        return x, torch.tensor([sample["y"] for sample in samples])


class RankSeeded(Everything):
    """The planted fault: dropout drawn from a generator that the rank seeds."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        torch.manual_seed(int(os.environ["RANK"]))
        return super().loss(model, batch)


class LibrarySum(Everything):
    """The planted fault: the library's all-reduce in the place of the tree."""

    def model(self) -> nn.Module:
        import torch.distributed as dist

        from samestep.reduce import exchange

        def start(self: Any) -> Iterator[Any]:
            yield dist.all_reduce(self.total, async_op=True)

        exchange._SliceSum.start = start  # type: ignore[method-assign]
        return super().model()


class Broken(Everything):
    """Raises on one rank in the second step."""

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        self.calls += 1
        if self.calls == 5 and rank() == self.rank:
            raise ZeroDivisionError("my own bug")
        return super().loss(model, batch)


class CountingStream:
    """One lane's samples, from a place that it can tell and be put to; draws noise."""

    def __init__(self, x: Tensor, y: Tensor, lane: int, lanes: int) -> None:
        self.x, self.y = x, y
        self.indices = range(lane, len(x), lanes)
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.indices):
            index = self.indices[self.place]
            self.place += 1
            yield self.x[index] + 0.1 * torch.randn(()), self.y[index]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class CountingStreams:
    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> CountingStream:
        return CountingStream(*points(SAMPLES + 7 * epoch), lane, lanes)


class StatefulStreamed(Streamed):
    def train_data(self) -> Any:
        return CountingStreams()


class Wider(Everything):
    """Another model than Everything's."""

    def model(self) -> nn.Module:
        model = Net(self.p)
        model.hidden = nn.Linear(6 * 36, 32)
        model.last = nn.Linear(32, CLASSES)
        model.extra = nn.Linear(2, 2)
        return model


class LostInEvaluation(Everything):
    """Rank 0 is killed while all ranks measure the model."""

    def metrics(self) -> Mapping[str, Metric]:
        return {}

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Metric]) -> tuple[Tensor, int]:
        if rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(model, batch)


class Slow(Everything):
    """Takes its time in every lane, for tests that do something meanwhile.

    Args:
        seconds: How long a lane takes.
        hurry: A file. Once it exists, lanes take no longer than they must: a test can have a run
            that does not end before something has happened to it, and need not wait for it then.
            Beside it `hurry.waiting-R` appears once a lane of rank R takes its time.
    """

    def __init__(self, seconds: float = 0.02, hurry: str = "") -> None:
        super().__init__()
        self.seconds, self.hurry = seconds, hurry

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        deadline = time.monotonic() + self.seconds
        if self.hurry:
            Path(f"{self.hurry}.waiting-{rank()}").touch()
        while (left := deadline - time.monotonic()) > 0 and not self._hurries():
            time.sleep(min(left, 0.05))
        return super().loss(model, batch)

    def _hurries(self) -> bool:
        return bool(self.hurry) and Path(self.hurry).exists()


class Confiding(Slow):
    """Leaves the secret of its launch in a file, for a test that then looks for it everywhere else."""

    def __init__(self, confide: str, **values: Any) -> None:
        super().__init__(**values)
        self.confide = Path(confide)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        if not self.confide.exists():  # a reader finds it whole once a step is done
            self.confide.write_text(os.environ["SAMESTEP_SECRET"])
        return super().loss(model, batch)


def rank() -> int:
    return detect_launch(dict(os.environ)).rank


class _Sleepy(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        if rank() == 1 and self.read > 12:
            time.sleep(10_000)
        return super().__getitem__(index)

    read = 0


class SleepyData(Everything):
    """Rank 1 never comes back from its data in the second step."""

    def train_data(self) -> Any:
        return _Sleepy(self.samples)


class SkipsBarrier(Everything):
    """On four ranks, all but one call a collective of their own in the second step."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        import gc

        from samestep.distributed.collectives import TorchCollectives

        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3 and rank() != 1:
            (ours,) = [o for o in gc.get_objects() if type(o) is TorchCollectives]
            ours.barrier()
        return super().loss(model, batch)


class BadLoss(Everything):
    """One lane's loss is infinite in one step."""

    def __init__(self, step: int, optimizer: str = "adamw") -> None:
        super().__init__(optimizer=optimizer)
        self.bad, self.calls = step, 0

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        if batch.lane == 5:
            if self.calls == self.bad:
                loss = loss * float("inf")
            self.calls += 1
        return loss, count


class Drifting(Everything):
    """One rank's weights change by themselves after the third step."""

    def model(self) -> nn.Module:
        self.made = super().model()
        return self.made

    def after_update(self, step: samestep.Step) -> None:
        if rank() == 1 and step.index == 2:
            with torch.no_grad():
                self.made.last.bias[0] += 1e-6


class BadGradient(Everything):
    """A finite loss whose gradient is not a number, in the fourth step."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        if batch.lane == 0:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 4:
                loss = loss + (model.last.bias * 0).abs().sum().sqrt()
        return loss, count


class Downloaded(Everything):
    """Its data come by a download, which draws random numbers and happens once on a machine."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def prepare_data(self) -> None:
        torch.rand(3)
        with (self.folder / "downloads").open("a") as file:
            file.write("x")

    def prepare_ranks(self, context: RunContext) -> None:
        assert (self.folder / "downloads").read_text() == "x"
        torch.rand(context.rank)
        self.ranks = context.gather(context.rank)

    def train_data(self) -> Any:
        assert self.ranks == list(range(len(self.ranks))), "all have met"
        self.shift = torch.rand(())  # the same whether or not this rank downloaded
        return super().train_data()

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        total, count = super().loss(model, batch)
        return total * (1 + self.shift.to(total.device)), count


class OwnCollective(Everything):
    """On rank 0 alone, a collective of the user's own in the second step."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        if batch.step == 1 and rank() == 0:
            torch.distributed.all_reduce(torch.ones(3))
        return super().loss(model, batch)


class HoldsInterpreter(Everything):
    """Rank 1 calls into C for a while in the second step, and no other thread of it can run."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        if batch.step == 1 and batch.lane == 4 and rank() == 1:
            ctypes.PyDLL(None).sleep(15)
        return super().loss(model, batch)


class Quits(Everything):
    """Rank 1 ends in the second step, as if all were well."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        if batch.step == 1 and rank() == 1:
            os._exit(0)
        return super().loss(model, batch)


class _Stuck(Noisy):
    """On rank 1 a sample is never ready: its loader's worker waits in a lock forever."""

    def __init__(self, samples: int, marker: str) -> None:
        super().__init__(samples)
        self.marker = Path(marker)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if rank() == 1:
            self.marker.write_text(str(os.getpid()))
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return super().__getitem__(index)


class StuckWorker(Everything):
    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker

    def train_data(self) -> Dataset[Any]:
        return _Stuck(SAMPLES, self.marker)
