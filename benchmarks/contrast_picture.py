"""Draws docs/images/contrastive.png: a contrast over the global batch, and one that each rank cuts for itself.

    python benchmarks/contrast_picture.py [FILE.png]

One small encoder is trained with the supervised contrast on the same batches of 64 samples: by hand on the
whole batch; by hand with the mean of the losses of 2, 4 and 8 ranks, each of its own samples, which is
what DistributedDataParallel makes of a loss that nobody gathers for; and by samestep on 1, 2, 4 and 8 real
ranks, whose curves must be the same numbers. Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measuring import on_ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import samestep
from samestep.losses import supcon

WORLDS = (1, 2, 4, 8)
BATCH, STEPS, CLASSES, SIZE = 64, 60, 16, 24
TEMPERATURE = 0.1
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "contrastive.png"


def made_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (BATCH * STEPS,), generator=generator)
    centres = torch.randn(CLASSES, SIZE, generator=generator)
    return centres[y] + 1.5 * torch.randn(len(y), SIZE, generator=generator), y


def made_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(SIZE, 64), nn.ReLU(), nn.Linear(64, 16))


def made_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def whole_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return supcon(model(x), y, TEMPERATURE)


def by_hand(ranks: int) -> list[float]:
    """Return where the whole batch's loss goes, if each of the ranks contrasts its own samples."""
    x, y = made_data()
    model = made_model()
    optimizer = made_optimizer(model)
    seen = []
    for xs, ys in zip(x.split(BATCH), y.split(BATCH), strict=True):
        with torch.no_grad():
            seen.append(whole_loss(model, xs, ys).item())
        parts = zip(xs.chunk(ranks), ys.chunk(ranks), strict=True)
        loss = torch.stack([whole_loss(model, a, b) for a, b in parts]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return seen


def by_samestep(folder: str) -> list[float]:
    config = {
        "run_dir": folder, "steps": STEPS, "global_batch": BATCH, "lanes": 8,
        "checkpoint": {"enabled": False},
        "distributed": {"device": "cpu", "threads_per_rank": 1},
    }  # fmt: skip
    dataset = TensorDataset(*made_data())
    with samestep.start(config) as run:
        model = made_model()
        model, _ = run.prepare(model, made_optimizer(model))
        order = samestep.orders.sequential(len(dataset))
        return [
            step.train_global(lambda batch: model(batch.x), lambda z, batch: supcon(z, batch.y, TEMPERATURE)).item()
            for step in run.steps(dataset, order)
        ]


def draw(curves: dict[int, list[float]], ours: dict[int, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    whole: dict[str, Any] = {"color": "black", "linewidth": 4, "alpha": 0.25}
    for axes in (left, right):
        axes.plot(curves[1], label="by hand, the whole batch", **whole)
        axes.set_xlabel("step")
    for ranks in WORLDS[1:]:
        left.plot(curves[ranks], label=f"{ranks} ranks", linewidth=1.2)
    for ranks, style in zip(WORLDS, ("-", "--", "-.", ":"), strict=True):
        right.plot(ours[ranks], style, label=f"{ranks} rank{'s' if ranks > 1 else ''}", linewidth=1.2)
    left.set_ylabel(f"loss of all {BATCH} samples")
    left.set_title("each rank contrasts its own samples")
    right.set_title("samestep: each sample with all others")
    for axes in (left, right):
        axes.legend(fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    curves = {ranks: by_hand(ranks) for ranks in WORLDS}
    with tempfile.TemporaryDirectory() as folder:
        ours = {ranks: on_ranks(ranks, by_samestep, f"{folder}/{ranks}") for ranks in WORLDS}
    if any(found != ours[1] for found in ours.values()):
        sys.exit("samestep's losses differ between numbers of ranks")
    draw(curves, ours, path)
    last = {f"by hand, {ranks} ranks": round(found[-1], 4) for ranks, found in curves.items()}
    print(json.dumps({**last, "samestep, any": round(ours[1][-1], 4)}, indent=2))
    apart = max(abs(a - b) for a, b in zip(curves[1], ours[1], strict=True))
    print(f"samestep and the whole batch by hand are at most {apart:.1e} apart; wrote {path}")


if __name__ == "__main__":
    main()
