"""The digits recipe as a loop of one's own: the same run, to the bit.

python examples/own_loop.py                                     # one process
torchrun --nproc-per-node 4 examples/own_loop.py                # four ranks, the same run
samestep verify examples/own_loop.py --worlds 1,2 --steps 4     # the proof
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torchmetrics.classification import MulticlassAccuracy

import samestep

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "digits"
sys.path.insert(0, str(RECIPE))
from task import Digits  # noqa: E402  (the recipe's model and data)


def measure(model, batch, metrics):
    logits = model(batch.x)
    metrics["accuracy"].update(logits, batch.y)
    return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)


def main(overrides):
    with samestep.start(RECIPE / "config.yaml", ["name=own-loop", *overrides]) as run:
        digits = Digits()
        train_set, valid_set = digits.train_data(), digits.valid_data()
        model = digits.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, weight_decay=0.01)
        total = run.total_steps(run.source(train_set))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total)
        model, optimizer, schedule = run.prepare(model, optimizer, schedule)

        for epoch in run.epochs():
            for _, (x, y) in run.enumerate(train_set):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y, reduction="sum")
                loss = run.backward(loss, count=y.size(0))
                optimizer.step()  # clips as the config says
                schedule.step()
            accuracy = {"accuracy": MulticlassAccuracy(10, average="micro")}
            values = run.evaluate(valid_set, measure, accuracy, step=run.step)
            run.log(run.step, values)
            run.print(f"epoch {epoch + 1}: accuracy {values['accuracy']:.4f}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
