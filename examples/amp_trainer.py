"""Mixed-precision training with one class: the same training on 1, 2 or 4 ranks, to the bit.

python examples/amp_trainer.py                                  # one process
torchrun --standalone --nproc-per-node 2 examples/amp_trainer.py             # two ranks, the same training
"""

import hashlib
import os

import torch
import torch.nn.functional as F
from torch import nn

from samestep.amp import AMPConfig, DistributedAMPTrainer

LANES = 4  # batches in one step, over all ranks
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def batch_of(step, lane):
    """Points in two rings; in every third step the last lane has fewer samples."""
    generator = torch.Generator().manual_seed(1000 * step + lane)
    samples = 3 if lane == LANES - 1 and step % 3 == 2 else 16
    ring = torch.randint(2, (samples,), generator=generator)
    angle = torch.rand(samples, generator=generator) * 6.2832
    radius = 1 + ring + 0.2 * torch.randn(samples, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), ring


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
    with DistributedAMPTrainer(
        model,
        AMPConfig.force_fp16(gradient_clip_max_norm=1.0),
        rank=rank,
        world_size=world,
        backend="nccl" if torch.cuda.is_available() else "gloo",
        accumulation_steps=LANES // world,
        learning_rate=0.01,
        loss_fn=F.cross_entropy,
    ) as trainer:
        mine = range(rank * LANES // world, (rank + 1) * LANES // world)
        for step in range(100):
            losses = [trainer.training_step(batch_of(step, lane)) for lane in mine]
            if rank == 0 and step % 20 == 0:
                print(f"step {step}: loss of lane 0 {losses[0]:.4f}", flush=True)
        if rank == 0:
            report(trainer)


def report(trainer):
    model = trainer.model.eval()
    x, ring = batch_of(step=-1, lane=0)
    device = next(model.parameters()).device
    with torch.no_grad():
        loss = F.cross_entropy(model(x.to(device)), ring.to(device))
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    print(f"final loss {float(loss):.6f}, weights {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
