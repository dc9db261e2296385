"""What BatchNorm over the global batch costs, beside lanes that normalise each by itself and the hand-written loop.

    python benchmarks/batchnorm.py [--rounds N] [--device cpu|cuda]

A small convolutional net with eight BatchNorm layers, 256 images of 32 x 32 in bf16 on a GPU, 32 of 16 x 16 on one CPU thread. Each
turn is a short training, interleaved with the others; the median time of a step counts, reading included.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from measuring import median_step
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import samestep

EPOCHS, STEPS = 3, 10
OURS = (("lane", 8), ("global", 8), ("global", 2), ("lane", 1))


def block(before: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, width):
        convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2))


def made_model(on_gpu: bool) -> nn.Sequential:
    torch.manual_seed(0)
    widths = (3, 64, 128, 256, 512) if on_gpu else (3, 16, 16, 32, 32)
    blocks = [block(*pair) for pair in pairwise(widths)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.LazyLinear(10))


def made_loader(on_gpu: bool) -> DataLoader[tuple[Tensor, ...]]:
    batch, side = (256, 32) if on_gpu else (32, 16)
    x = torch.randn(STEPS * batch, 3, side, side)
    return DataLoader(TensorDataset(x, torch.randint(10, (len(x),))), batch_size=batch)


def prepared_model(loader: DataLoader[tuple[Tensor, ...]], on_gpu: bool) -> nn.Sequential:
    model = made_model(on_gpu)
    model(next(iter(loader))[0][:2])  # the last layer learns its size
    return model


def by_hand(device: torch.device) -> Iterator[None]:
    on_gpu = device.type == "cuda"
    loader = made_loader(on_gpu)
    model = prepared_model(loader, on_gpu).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=on_gpu)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            yield


def by_samestep(device: torch.device, kind: str, lanes: int) -> Iterator[None]:
    on_gpu = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "epochs": EPOCHS, "lanes": lanes, "batchnorm": kind, "run_dir": f"{folder}/run",
            "precision": "bf16" if on_gpu else "fp32", "checkpoint": {"enabled": False},
            "distributed": {"device": device.type},
        }  # fmt: skip
        with samestep.start(config) as run:
            loader = made_loader(on_gpu)
            model = prepared_model(loader, on_gpu)
            optimizer = torch.optim.AdamW(model.parameters(), fused=on_gpu)
            model, optimizer, batches = run.prepare(model, optimizer, loader)
            for _ in run.epochs():
                for x, y in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    print("hand-written, ms; then as ratios:", *(f"{kind}/{lanes}" for kind, lanes in OURS))
    for _ in range(options.rounds):
        plain = median_step(by_hand(device), device, STEPS)
        ratios = [median_step(by_samestep(device, *ours), device, STEPS) / plain for ours in OURS]
        print(f"{1e3 * plain:.2f}", *(f"{ratio:.2f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
