"""Trainings of two networks, and losses over the whole batch: two optimizers, and own loops."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import samestep
from samestep import LaneBatch, Task
from tests.sameness.models.base import FEATURES, points

NOISE = 6


class Networks(nn.Module):
    """A generator and a discriminator, as one module."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, FEATURES))
        self.discriminator = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1)
        )

    def fake(self, samples: int) -> Tensor:
        device = next(self.parameters()).device
        return self.generator(torch.randn(samples, NOISE, device=device))


def real_or_fake(scores: Tensor, real: bool) -> Tensor:
    wanted = torch.full_like(scores, float(real))
    return F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum")


def discriminator_loss(nets: Networks, real: Tensor, fake: Tensor) -> Tensor:
    scores = nets.discriminator(real), nets.discriminator(fake.detach())
    return real_or_fake(scores[0], True) + real_or_fake(scores[1], False)


class JointGAN(Task):
    """Both networks learn in every step, by one loss and two optimizers."""

    def model(self) -> nn.Module:
        return Networks()

    def train_data(self) -> Any:
        return TensorDataset(*points())

    def optimizers(self, model: nn.Module) -> Any:
        return [
            torch.optim.Adam(model.generator.parameters(), lr=2e-3, betas=(0.5, 0.99)),
            torch.optim.RMSprop(model.discriminator.parameters(), lr=1e-3),
        ]

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        fake = model.fake(len(batch))
        # The generator learns from the discriminator, which learns nothing from that.
        constants = {n: p.detach() for n, p in model.discriminator.named_parameters()}
        scores = functional_call(model.discriminator, constants, (fake,))
        losses = discriminator_loss(model, batch.x, fake) + real_or_fake(scores, True)
        return losses, len(batch)


def alternating_gan(run: samestep.Run) -> tuple[Any, ...]:
    """An own loop: the discriminator in two steps of three, the generator in the third."""
    nets = Networks()
    of_generator = torch.optim.Adam(nets.generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
    of_discriminator = torch.optim.Adam(nets.discriminator.parameters(), lr=1e-3)
    nets, of_generator, of_discriminator = run.prepare(nets, of_generator, of_discriminator)
    nets.train()
    data = TensorDataset(*points())
    for x, *_ in (batch for _ in run.epochs() for _, batch in run.enumerate(data)):
        fake = nets.fake(x.size(0))
        if run.step % 3 == 2:
            optimizer, loss = of_generator, real_or_fake(nets.discriminator(fake), True)
        else:
            optimizer, loss = of_discriminator, discriminator_loss(nets, x, fake)
        for each in (of_generator, of_discriminator):
            each.zero_grad()
        run.backward(loss, count=x.size(0))
        optimizer.step()
    return of_generator, of_discriminator


class AlternatingGAN(JointGAN):
    """The same as a task: which network learns follows from the number of the step."""

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Any]:
        fake = model.fake(len(batch))
        if batch.step % 3 < 2:
            return discriminator_loss(model, batch.x, fake), len(batch)
        constants = {n: p.detach() for n, p in model.discriminator.named_parameters()}
        scores = functional_call(model.discriminator, constants, (fake,))
        return real_or_fake(scores, True), len(batch)


def contrastive(run: samestep.Run) -> tuple[Any, ...]:
    """An own loop: every sample is compared with all others of the global batch, of which its own lane's have gradients."""
    model = nn.Sequential(nn.Linear(FEATURES, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = run.prepare(model, optimizer)
    model.train()
    columns = points()
    data = TensorDataset(*columns, torch.arange(len(columns[0])))
    for x, *_, number in (batch for _ in run.epochs() for _, batch in run.enumerate(data)):
        own = views(model, x)
        others, numbers = run.gather(own[1].detach()), run.gather(number)
        is_own = (numbers == number[:, None]).any(0)
        far = (own[0] @ others.T).masked_fill(is_own, -torch.inf)
        logits = torch.cat([own[0] @ own[1].T, far], dim=1) / 0.2
        target = torch.arange(x.size(0), device=run.device)
        optimizer.zero_grad()
        run.backward(F.cross_entropy(logits, target, reduction="sum"), count=x.size(0))
        optimizer.step()
    return (optimizer,)


def views(model: nn.Module, x: Tensor) -> Tensor:
    """Two embeddings of each sample, each with noise of its own."""
    noisy = torch.stack([x + 0.1 * torch.randn_like(x) for _ in range(2)])
    return F.normalize(model(noisy), dim=-1)
