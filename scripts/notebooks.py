"""Writes docs/notebooks, one for each page to start with: `python scripts/notebooks.py`.

They run as they are on Colab and Kaggle, with no network but pip.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "docs" / "notebooks"

INSTALL = """import importlib.util

if importlib.util.find_spec("samestep") is None:
    %pip install -q samestep[plots]"""

NOTEBOOKS = {
    "tour": [
        "# A tour of samestep\n\nA project, a training, and the proof that it is the same run on 1, 2 and 4 ranks. "
        "It takes about two minutes on two CPU cores.",
        INSTALL,
        "`samestep init` writes a config and a task: a model, data and a loss.",
        "!samestep init mine\n!cat mine/task.py",
        "Train it on one process, then on two ranks. The second run resumes the first, since it has the same name: "
        "set another one.",
        "!samestep train mine/config.yaml name=one\n!samestep launch mine/config.yaml --nproc 2 name=two",
        "Both have the same losses, to the last digit:",
        """import json
from pathlib import Path


def losses(run):
    rows = map(json.loads, Path(f"runs/{run}/metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


assert losses("one") == losses("two")
losses("two")[-3:]""",
        "`samestep verify` compares every loss and every tensor of the final state, and draws the losses:",
        "!samestep verify mine/config.yaml --worlds 1,2,4 --steps 12 --picture losses.png",
        'from IPython.display import Image\n\nImage("losses.png", width=700)',
        "Next: `samestep ui` shows runs live in a browser, and the other notebook here uses your own loop.",
    ],
    "own_loop": [
        "# Your own loop on several ranks\n\nThe loop that you have, in a function. `samestep.notebook_launcher` runs "
        "it on ranks of this machine.",
        INSTALL,
        """import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samestep""",
        "Four lines are samestep's: `start`, `prepare`, `epochs`, and `mean`, which is the loss over all ranks. `seed` sets "
        "the weights, the order of samples and dropout.",
        """def train(name):
    with samestep.start(epochs=3, seed=0, name=name, resume="never") as run:
        x = torch.randn(512, 8, generator=torch.Generator().manual_seed(7))
        dataset = TensorDataset(x, (x[:, :4].sum(1) > 0).long())
        model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(dataset, batch_size=64, shuffle=True)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        losses = []
        for _ in run.epochs():
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(run.mean(loss).item())
        run.print(f"{run.context.world} ranks: last loss {losses[-1]!r}")
        return losses""",
        "On one process, on two ranks, on four. All losses are bit-identical.",
        'found = {world: samestep.notebook_launcher(train, world, f"on-{world}") for world in (1, 2, 4)}\n'
        "assert found[1] == found[2] == found[4]\n[loss[-1] for loss in found.values()]",
        "The runs are in `runs/`: draw them, or look at one.",
        "!samestep plot runs/on-1 runs/on-4 --metric loss\n!samestep show runs/on-4",
    ],
    "coming_from": [
        "# A script that exists already\n\nFrom a loop for one process to a run at any size: check it, change it, "
        "prove it.",
        INSTALL,
        "A script as people write it:",
        """%%writefile before.py
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(256, 4)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
print(loss.item())""",
        "`samestep check` reads it, and says what would go wrong on several ranks:",
        "!samestep check before.py || true",
        "The same script with samestep. Four lines changed:",
        """%%writefile after.py
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import samestep

run = samestep.start(epochs=2, seed=0, name="ported")
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in run.epochs():
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
run.print(run.context.world, "ranks are done")""",
        "The proof, on your own script:",
        "!samestep verify after.py --worlds 1,2 --steps 8",
        "From here on any launcher starts it: `samestep launch after.py --nproc 2`, torchrun, mpirun or Slurm.",
    ],
}


def notebook(cells: list[str]) -> dict[str, Any]:
    """A notebook of texts and programs, which alternate; the first is a text."""
    made: list[dict[str, Any]] = []
    for number, text in enumerate(cells):
        is_code = text == INSTALL or (bool(made) and _is_code(text))
        cell: dict[str, Any] = {"cell_type": "code" if is_code else "markdown", "id": f"cell-{number}", "metadata": {}}
        if is_code:
            cell |= {"execution_count": None, "outputs": []}
        made.append({**cell, "source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _is_code(text: str) -> bool:
    return text.startswith(("!", "%", "import ", "from ", "def ", "found "))


def texts() -> dict[Path, str]:
    """The content of every notebook's file."""
    return {TARGET / f"{name}.ipynb": json.dumps(notebook(cells), indent=1) + "\n" for name, cells in NOTEBOOKS.items()}


if __name__ == "__main__":
    TARGET.mkdir(exist_ok=True)
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
