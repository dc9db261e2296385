"""Sea ice from air and water temperature: trained here, run and differentiated in C++."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from samestep import Task

INPUTS = ["sst", "tair", "hi"]


def observations(samples, seed):
    """Inputs (sea and air temperature, ice thickness) and target (fraction of the sea under ice)."""
    draws = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed))
    x = draws * torch.tensor([8.0, 15.0, 1.2]) + torch.tensor([14.0, -10.0, 1.5])
    covered = 0.7 * ((10 - x[:, 1]) / 30).clamp(min=0) + 0.3 * x[:, 2] / 5
    return x, covered.clamp(0, 1).unsqueeze(1)


class Net(nn.Module):
    """Takes and returns physical values; TorchScript keeps its methods and its attributes."""

    input_names: list[str]
    output_names: list[str]

    def __init__(self, mean, std, hidden=16):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.layers = nn.Sequential(nn.Linear(3, hidden), nn.GELU(), nn.Linear(hidden, 1))
        self.input_names, self.output_names = INPUTS, ["aice"]

    def forward(self, x):
        return self.layers(self.normalise(x))

    @torch.jit.export
    def normalise(self, x):
        return (x - self.mean) / self.std

    @torch.jit.export
    def jacobian(self, x):
        """d output / d input for each sample: [batch, outputs, inputs]."""
        x = x.detach().requires_grad_(True)
        y = self.forward(x)
        rows: list[torch.Tensor] = []
        for output in range(y.size(1)):
            (row,) = torch.autograd.grad([y[:, output].sum()], [x], retain_graph=True)
            assert row is not None  # for the compiler, which cannot rule out None
            rows.append(row)
        return torch.stack(rows, 1)


class Emulator(Task):
    def model(self):
        x, _ = observations(2000, seed=1)
        return Net(x.mean(0), x.std(0))

    def train_data(self):
        return TensorDataset(*observations(2000, seed=1))

    def valid_data(self):
        return TensorDataset(*observations(300, seed=2))

    def optimizers(self, model):
        return torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(self, model, batch):
        return F.mse_loss(model(batch.x), batch.y, reduction="sum"), len(batch)
