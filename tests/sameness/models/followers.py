"""State besides the weights: buffers that forward changes, teachers, queues, codebooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep import Concatenate, LaneBatch
from samestep.step.step import Step
from tests.sameness.models.base import CLASSES, FEATURES, Classify, Validated, mlp


class MovingMean(nn.Module):
    """Subtracts a moving mean of its inputs, kept in a buffer of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.last = nn.Linear(FEATURES, CLASSES)
        dtype = {"bf16": torch.bfloat16, "complex": torch.complex64}.get(kind, torch.float32)
        start = torch.zeros(FEATURES, dtype=dtype)
        if kind == "attribute":
            self.mean = start
        else:
            self.register_buffer("mean", start, persistent=kind != "not saved")
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if kind == "float64":
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        if kind == "infinite":
            self.register_buffer("lowest", torch.full((FEATURES,), torch.inf))
        if kind == "flag":
            self.register_buffer("known", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.follow(x)
        mean = torch.fft.ifft(self.mean).real if self.kind == "complex" else self.mean.float()
        return self.last(x - mean)

    def follow(self, x: Tensor) -> None:
        now = x.mean(0)
        self.seen += (x.double().abs().sum() * 1e6).round().long() if self.kind == "int64" else len(x)
        if self.kind in ("reassigned", "attribute"):
            self.mean = 0.9 * self.mean + 0.1 * now
        elif self.kind == "complex":
            self.mean.mul_(0.9).add_(torch.fft.fft(now), alpha=0.1)
        elif self.kind != "flag":
            self.mean.mul_(0.9).add_(now.to(self.mean.dtype), alpha=0.1)
        elif not self.known:
            self.mean.copy_(now)
            self.known.fill_(True)
        if self.kind == "infinite":
            self.lowest.copy_(torch.minimum(self.lowest, x.amin(0)))
        if self.kind == "float64":
            self.count += x.double().sum()


class Buffers(Classify):
    """A buffer that forward changes, of any kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def model(self) -> nn.Module:
        return MovingMean(self.kind)


class Tied(nn.Module):
    """A head that shares its weight with the model."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.weight.T))


class TiedModules(Classify):
    """The model and an extra module have a parameter in common."""

    def model(self) -> nn.Module:
        encoder = nn.Linear(FEATURES, 8, bias=False)
        self.head = Tied(encoder.weight)
        return encoder

    def extra_modules(self) -> list[nn.Module]:
        return [self.head]

    def optimizers(self, model: nn.Module) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        logits = self.head(torch.tanh(model(batch.x)))
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)


class CumulativeBatchNorm(Validated):
    """BatchNorm whose statistics are plain means over all batches so far."""

    def model(self) -> nn.Module:
        first, last = nn.Linear(FEATURES, 8, bias=False), nn.Linear(8, CLASSES)
        return nn.Sequential(first, nn.BatchNorm1d(8, momentum=None), nn.ReLU(), last)


class Codebook(nn.Module):
    """A vector-quantised autoencoder whose codes follow what is assigned to them."""

    def __init__(self, codes: int = 12, width: int = 4) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, width), nn.Linear(width, FEATURES)
        start = torch.randn(codes, width)
        self.register_buffer("sizes", torch.ones(codes))
        self.register_buffer("sums", start)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.encode(x)
        codes = self.sums / self.sizes.clamp(min=1e-3)[:, None]
        nearest = torch.cdist(found, codes).argmin(1)
        chosen = codes[nearest]
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(nearest, len(codes)).to(found)
                self.sizes.lerp_(hits.sum(0).float(), 0.05)
                self.sums.lerp_((hits.T @ found).float(), 0.05)
        through = found + (chosen - found).detach()
        return self.decode(through), F.mse_loss(found, chosen, reduction="sum")


class VectorQuantised(Classify):
    def model(self) -> nn.Module:
        return Codebook()

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        out, commitment = model(batch.x)
        return F.mse_loss(out, batch.x, reduction="sum") + 0.25 * commitment, len(batch)


class Student(nn.Module):
    """A network and a frozen copy that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


class MomentumTeacher(Classify):
    """The teacher follows after every update (BYOL, DINO)."""

    def model(self) -> nn.Module:
        self.net = Student()
        return self.net

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        one, other = (batch.x + 0.1 * torch.randn_like(batch.x) for _ in range(2))
        aims = model.teacher(other).softmax(1)
        loss = F.cross_entropy(model.student(one), aims, reduction="sum")
        return loss + F.cross_entropy(model.student(one), batch.y, reduction="sum"), len(batch)

    def after_update(self, step: Step) -> None:
        self.net.follow()
        with torch.no_grad():  # it may draw, too
            bias = self.net.teacher[-1].bias
            bias.add_(torch.randn_like(bias), alpha=1e-3)


class TeacherInForward(MomentumTeacher):
    """The mistake: it follows in every forward pass, so as often as a rank has lanes."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        model.follow()
        return super().loss(model, batch)

    def after_update(self, step: Step) -> None:
        return


class Queue(Student):
    """MoCo: the teacher's answers wait in a queue, in the order of the lanes."""

    LENGTH = 64
    buffer_joins = {"queue": Concatenate(pointer="next")}  # noqa: RUF012 (as modules declare it)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(self.LENGTH, CLASSES), dim=1))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        one, other = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        query = F.normalize(self.student(one), dim=1)
        with torch.no_grad():
            key = F.normalize(self.teacher(other), dim=1)
        right = (query * key).sum(1, keepdim=True)
        logits = torch.cat([right, query @ self.queue.T.clone()], 1) / 0.2
        if self.training:
            places = (self.next + torch.arange(len(x), device=x.device)) % self.LENGTH
            self.queue[places] = key
            self.next.add_(len(x)).remainder_(self.LENGTH)
        return logits


class MoCo(MomentumTeacher):
    def model(self) -> nn.Module:
        self.net = Queue()
        return self.net

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        logits = model(batch.x)
        first = torch.zeros(len(batch), dtype=torch.long, device=logits.device)
        return F.cross_entropy(logits, first, reduction="sum"), len(batch)


class LongLivedGenerator(Classify):
    """The mistake: noise from a generator that lives as long as the process."""

    def model(self) -> nn.Module:
        self.generator = torch.Generator().manual_seed(7)
        return mlp()

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        noise = torch.randn(batch.x.shape, generator=self.generator).to(batch.x.device)
        return F.cross_entropy(model(batch.x + noise), batch.y, reduction="sum"), len(batch)


class CountedInPython(Classify):
    """The mistake: a number that changes the loss and that no checkpoint holds."""

    def model(self) -> nn.Module:
        self.calls = 0
        return mlp()

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        self.calls += 1
        loss, count = super().loss(model, batch)
        return loss / self.calls, count
