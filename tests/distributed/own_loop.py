"""A loop as a person writes it, for the commands that take a script: two modules, an average.

python own_loop.py RUN_DIR [--fail-on RANK] [--rank-seeded]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from tests.distributed.tasks import Net, Noisy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir")
    parser.add_argument("--fail-on", type=int)
    parser.add_argument("--rank-seeded", action="store_true")
    options = parser.parse_args()
    config = {"global_batch": 32, "epochs": 2, "run_dir": options.run_dir, "distributed": {"threads_per_rank": 1}}
    with samestep.start(config) as run:
        model, head = Net(0.3), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3)
        model, head, optimizer = run.prepare(model, head, optimizer)
        data = Noisy(90)
        steps = (batch for _ in run.epochs() for _, batch in run.enumerate(data))
        for x, y in steps:
            if options.rank_seeded:
                x = x + torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(run.rank))
            loss = F.cross_entropy(head(model(x)), y, reduction="sum")
            optimizer.zero_grad()
            run.backward(loss, count=y.size(0))
            if run.step == 1 and run.rank == options.fail_on:
                raise ZeroDivisionError("my own bug")
            optimizer.step()


if __name__ == "__main__":
    main()
