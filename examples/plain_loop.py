"""A loop as most scripts have it: DataLoaders, epochs, a scheduler, an evaluation after each epoch.

python examples/plain_loop.py                                     # one process
torchrun --nproc-per-node 4 examples/plain_loop.py                # four ranks, the same run
samestep verify examples/plain_loop.py --worlds 1,2 --steps 12    # the proof
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import samestep

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(x[:1500], y[:1500]), batch_size=64, shuffle=True)
valid_loader = DataLoader(TensorDataset(x[1500:], y[1500:]), batch_size=32)

with samestep.start(epochs=3, lanes=8, seed=0, name="plain-loop") as run:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler, train_loader, valid_loader = run.prepare(
        model, optimizer, scheduler, train_loader, valid_loader
    )
    for epoch in run.epochs():
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        scheduler.step()
        right = 0
        for inputs, targets in valid_loader:
            right += (model(inputs).argmax(1) == targets).sum().item()
        accuracy = run.reduce(right) / len(x[1500:])
        run.log(run.step, {"accuracy": accuracy})
        run.print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {accuracy:.4f}")
