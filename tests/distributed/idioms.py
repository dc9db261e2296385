"""Small tasks, each with one idiom of models that people write, which could depend on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import samestep
from samestep import LaneBatch, Task

_GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(90, 16, generator=_GENERATOR)
Y = torch.randint(0, 5, (90,), generator=_GENERATOR)


class Idiom(Task):
    """A linear classifier of numbers, around which the others put their idiom."""

    Net: type[nn.Module]

    def model(self) -> nn.Module:
        self.made = self.Net()
        return self.made

    def optimizers(self, model: nn.Module) -> Optimizer:
        return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def train_data(self) -> TensorDataset:
        return TensorDataset(X, Y)

    def valid_data(self) -> TensorDataset:
        return TensorDataset(X[:40], Y[:40])

    def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)


class Statistics(nn.Module):
    """A linear layer and a buffer that training moves."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 5)
        self.m: Tensor
        self.register_buffer("m", buffer)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.move(x)
        out: Tensor = self.linear(x - self.shift())
        return out

    def move(self, x: Tensor) -> None:
        raise NotImplementedError

    def shift(self) -> Tensor:
        return self.m


def _moving(buffer: Callable[[], Tensor], move: Callable[[Any, Tensor], None]) -> type[Idiom]:
    """A task whose net has such a buffer, and moves it so."""

    class Net(Statistics):
        def __init__(self) -> None:
            super().__init__(buffer())

        def move(self, x: Tensor) -> None:
            move(self, x)

        def shift(self) -> Tensor:
            return self.m.float() if self.m.shape == (16,) else torch.zeros(())

    return type("Moving", (Idiom,), {"Net": Net})


def _assign(net: Any, x: Tensor) -> None:
    net.m = 0.9 * net.m + 0.1 * x.mean(0)


def _count(net: Any, x: Tensor) -> None:
    net.m += int((x.abs().sum() * 1e6).round())


Reassigned = _moving(lambda: torch.zeros(16), _assign)
Bf16 = _moving(
    lambda: torch.zeros(16, dtype=torch.bfloat16), lambda net, x: net.m.mul_(0.9).add_(x.mean(0).bfloat16(), alpha=0.1)
)
Counter = _moving(lambda: torch.zeros((), dtype=torch.int64), _count)


class Mixed(Idiom):
    """Buffers of three types side by side, one of them a flag."""

    class Net(Statistics):
        def __init__(self) -> None:
            super().__init__(torch.zeros(16))
            self.n: Tensor
            self.done: Tensor
            self.register_buffer("n", torch.zeros((), dtype=torch.float64))
            self.register_buffer("done", torch.tensor(False))

        def move(self, x: Tensor) -> None:
            if not self.done:
                self.m.copy_(x.mean(0))
                self.done.fill_(True)
            self.m.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.n += len(x) / 3


class Spectrum(Idiom):
    """Complex parameters, and a complex buffer."""

    class Net(Statistics):
        def __init__(self) -> None:
            super().__init__(torch.zeros(9, dtype=torch.complex64))
            self.w = nn.Parameter(torch.randn(9, dtype=torch.complex64))

        def move(self, x: Tensor) -> None:
            self.m.mul_(0.9).add_(torch.fft.rfft(x.mean(0)), alpha=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.w, 16))

        def shift(self) -> Tensor:
            return torch.fft.irfft(self.m, 16)


class Queue(Idiom):
    """MoCo's queue of keys, written as MoCo writes it."""

    class Net(nn.Module):
        buffer_joins: ClassVar = {"queue": samestep.Concatenate(pointer="at", dim=1)}

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 5)
            self.queue: Tensor
            self.at: Tensor
            self.register_buffer("queue", F.normalize(torch.randn(5, 48), dim=0))
            self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            keys: Tensor = self.linear(x)
            negatives = self.queue.clone()
            out = keys + (keys @ negatives).softmax(1) @ negatives.T
            if self.training:
                with torch.no_grad():
                    places = (int(self.at) + torch.arange(len(x))) % 48
                    self.queue[:, places] = F.normalize(keys, dim=1).T
                    self.at[0] = (int(self.at) + len(x)) % 48
            return out


class TeacherInForward(Idiom):
    """A frozen copy that follows in forward, as BYOL, DINO and MoCo are often written."""

    class Net(nn.Module):
        follows_in_forward = True

        def __init__(self) -> None:
            super().__init__()
            self.fast, self.slow = nn.Linear(16, 5), nn.Linear(16, 5).requires_grad_(False)

        def follow(self) -> None:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)

        def forward(self, x: Tensor) -> Tensor:
            if self.training and self.follows_in_forward:
                self.follow()
            out: Tensor = self.fast(x) + 0.1 * self.slow(x)
            return out


class Teacher(TeacherInForward):
    """The same, following after the update, with noise of its own."""

    def model(self) -> nn.Module:
        made = super().model()
        made.follows_in_forward = False  # type: ignore[assignment]
        return made

    def after_update(self, step: samestep.Step) -> None:
        self.made.follow()  # type: ignore[operator]
        with torch.no_grad():
            self.made.slow.bias.add_(torch.randn(5), alpha=1e-3)  # type: ignore[union-attr]


class _Langevin(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(torch.randn_like(param), alpha=1e-3)


class Langevin(Idiom):
    """An optimizer that draws noise."""

    def model(self) -> nn.Module:
        return nn.Linear(16, 5)

    def optimizers(self, model: nn.Module) -> Optimizer:
        return _Langevin(model.parameters(), lr=0.05)


class RandomRates(Idiom):
    """A schedule whose function draws."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 5))

    def schedules(self, optimizers: Sequence[Optimizer], steps: int | None) -> samestep.Schedule:
        def factor(step: int) -> float:
            return 1.0 + float(torch.rand(()))

        return samestep.Schedule(LambdaLR(optimizers[0], factor))


class SparseTable(Idiom):
    """Sparse gradients from a function: no module says so beforehand."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(8, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x[:, 0].abs().long().clamp(max=7), self.table, sparse=True)


class Disproportionate(Idiom):
    """Named losses whose counts are in another proportion in odd lanes."""

    def model(self) -> nn.Module:
        return nn.Linear(16, 5)

    def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
        out = model(batch.x)
        fit = F.cross_entropy(out, batch.y, reduction="sum")
        size = (out.square().sum(), (1 + batch.lane % 2) * len(batch))
        return {"fit": (fit, len(batch)), "size": size}


class Named(Idiom):
    """Losses with names, one of them with a weight that follows the run's progress."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.2), nn.Linear(8, 5))

    def optimizers(self, model: nn.Module) -> Optimizer:
        first, last = model[0], model[2]  # type: ignore[index]
        groups: Iterable[dict[str, Any]] = [
            {"params": first.parameters(), "clip_norm": 0.05},
            {"params": last.parameters(), "clip_norm": None},
        ]
        return SGD(groups, lr=0.05)

    def loss(self, model: nn.Module, batch: LaneBatch) -> Any:
        out = model(batch.x)
        assert batch.lanes == 8
        assert batch.device == out.device
        size = self.factor(batch) * out.square().sum()
        return {"fit": (F.cross_entropy(out, batch.y, reduction="sum"), len(batch)), "size": (size, 5 * len(batch))}

    def factor(self, batch: LaneBatch) -> float:
        return batch.progress / (1 + batch.epoch)

    def on_save(self, folder: Path) -> None:
        (folder / "saved.txt").write_text("saved")

    def on_end(self, folder: Path) -> None:
        (folder / "ended.txt").write_text("ended")


class NamedAlike(Named):
    """The same weight all the time, as a CUDA graph needs it."""

    def factor(self, batch: LaneBatch) -> float:
        return 0.5


IDENTICAL: Sequence[str] = (
    "Reassigned", "Bf16", "Counter", "Mixed", "Spectrum", "Queue", "Teacher", "Langevin",
    "RandomRates",
)  # fmt: skip
