"""A GAN with two optimizers, which learns the points of a ring."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Task

NOISE = 4


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, noise):
        return self.generator(noise)


def scores(discriminator, points, real):
    wanted = torch.full((len(points), 1), float(real), device=points.device)
    return F.binary_cross_entropy_with_logits(discriminator(points), wanted, reduction="sum")


class Gan(Task):
    """The discriminator learns in two steps of three, the generator in the third.

    Which one it is follows from the number of the step, so a run that is resumed goes on with the
    right one. The other network has no gradients then, and its optimizer does nothing: that is what
    `find_unused_parameters` in the config allows.
    """

    def model(self):
        return Networks()

    def train_data(self):
        angles = torch.linspace(0, 6.283, 512)
        return TensorDataset(torch.stack([angles.cos(), angles.sin()], 1))

    def optimizers(self, model):
        return [
            torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
            torch.optim.Adam(model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        ]

    def loss(self, model, batch):
        fake = model(torch.randn(len(batch), NOISE, device=batch.device))
        if batch.step % 3 == 2:
            # The generator learns from the discriminator, which learns nothing from that.
            frozen = {n: p.detach() for n, p in model.discriminator.named_parameters()}

            def discriminator(points):
                return torch.func.functional_call(model.discriminator, frozen, (points,))

            return scores(discriminator, fake, real=True), len(batch)
        seen = scores(model.discriminator, batch.x, real=True)
        return seen + scores(model.discriminator, fake.detach(), real=False), len(batch)
