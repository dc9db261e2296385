"""A momentum teacher, as in BYOL and DINO: a frozen copy that follows the student."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Task


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        return self.student(x)


class Teacher(Task):
    """Two noisy views of a sample: the student predicts what the teacher makes of the other one.

    The teacher moves in `after_update`, once a step and on every rank alike. In `loss` it would move
    once for every lane, which is refused.
    """

    def __init__(self, momentum=0.99):
        self.momentum = momentum

    def model(self):
        self.pair = Pair()
        return self.pair

    def train_data(self):
        return TensorDataset(torch.randn(512, 16, generator=torch.Generator().manual_seed(1)))

    def optimizers(self, model):
        return torch.optim.AdamW(model.student.parameters(), lr=1e-3)

    def loss(self, model, batch):
        one, other = (batch.x + 0.2 * torch.randn_like(batch.x) for _ in range(2))
        temperature = 0.2 - 0.1 * batch.progress  # from 0.2 at the start to 0.1 at the end
        with torch.no_grad():
            aims = (model.teacher(other) / temperature).softmax(1)
        return F.cross_entropy(model(one) / 0.2, aims, reduction="sum"), len(batch)

    def after_update(self, step):
        with torch.no_grad():
            pairs = zip(self.pair.teacher.parameters(), self.pair.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 1 - self.momentum)

    def on_end(self, folder):
        torch.save(self.pair.teacher.state_dict(), folder / "teacher.pt")
