"""Runs that look finished, made without training, and tasks that predict from them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from samestep import LaneBatch, Task
from samestep.checkpoint.files import Files
from samestep.checkpoint.format import write_checkpoint
from samestep.checkpoint.manifest import Best, Manifest, folder_name
from samestep.config import load_config
from samestep.run.origin import ORIGIN, Origin


def finished_run(
    folder: Path,
    task: str = "Scores",
    steps: tuple[int, ...] = (3,),
    best: int | None = None,
    kept: Mapping[str, Any] | None = None,
    **values: Any,
) -> Path:
    """A run's directory with checkpoints of other weights each."""
    config = load_config(
        {
            "task": f"{__file__}:{task}",
            "global_batch": 32,
            "lanes": 8,
            "steps": max(steps),
            "run_dir": str(folder),
            "distributed": {"threads_per_rank": 1, "timeout": 60},
            **values,
        }
    )
    folder.mkdir(parents=True)
    document = config.model_dump_json()
    (folder / "config.json").write_text(document)
    (folder / ORIGIN).write_text(Origin.of(config).text(document))
    for step in steps:
        torch.manual_seed(step)
        manifest = Manifest(
            step=step, epoch=1, world=2, saved_at=1.7e9, metrics={}, ended=None, config={},
            best=None if best is None else Best(best, "val_loss", 0.5), plan={}, versions={},
        )  # fmt: skip
        made: Task = globals()[task](**config.params)
        weights = made.model().state_dict()
        modules = [module.state_dict() for module in made.extra_modules()]
        training = {"model": {}, "shared": {}, "modules": modules, "optimizers": []}
        target = folder / "checkpoints" / folder_name(step)
        target.parent.mkdir(exist_ok=True)
        write_checkpoint(Files(), target, weights, {**training, "kept": dict(kept or {})}, manifest)
    return folder


def points(samples: int) -> Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(5))


class Noisy(Dataset[tuple[Tensor, int]]):
    """Draws from python and torch while it is read."""

    def __init__(self, samples: int) -> None:
        self.x = points(samples)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index] + random.random() + torch.randn(6), index * 7


class Scores(Task):
    """A net whose predictions are drawn as well: by its data, and by a dropout that stays on."""

    def __init__(self, gives: str = "output", fails_at: int = -1) -> None:
        self.gives, self.fails_at = gives, fails_at

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))

    def train_data(self) -> Any:
        return Noisy(21)

    def valid_data(self) -> Any:
        return None if self.gives == "no valid" else TensorDataset(points(37), torch.arange(37))

    def predict_data(self, source: str) -> Any:
        kind, _, samples = source.partition(":")
        if kind == "plain":
            return list(points(int(samples)))
        if kind == "stream":
            return iter(points(int(samples)))
        return {"noisy": Noisy, "empty": lambda _: []}[kind](int(samples or 0))

    def predict(self, model: nn.Module, batch: LaneBatch) -> Any:
        scores = super().predict(model, batch)
        last = batch.ids[-1] == self.fails_at
        kinds: dict[str, Any] = {
            "output": lambda: scores,
            "columns": lambda: {
                "scores": F.dropout(scores, 0.3, training=True),
                "half": scores.bfloat16()[:, 0],
                "y": batch.y,
                "tag": [f'"{number}", ä' for number in batch.ids],
            },
            "ragged": lambda: {
                "tokens": [torch.arange(number % 3) for number in batch.ids],
                "grid": scores.view(-1, 3, 1).expand(-1, 3, 2).double(),
                "maybe": [None if number % 2 else number / 3 for number in batch.ids],
            },
            "short": lambda: {"a": scores[:, 0], "b": scores[1:, 0] if last else scores[:, 1]},
            "renames": lambda: {"b" if last else "a": scores[:, 0]},
            "retypes": lambda: {"a": scores[:, 0].long() if last else scores[:, 0]},
            "reshapes": lambda: {"a": scores[:, :2] if last else scores},
            "mixed": lambda: {"a": ["text" if last else 1] * len(batch)},
            "one": scores.sum,
            "pair": lambda: {"a": {"no": "column"}},
            "nothing": dict,
            "index": lambda: {"index": scores},
            "odd": lambda: {"a": [object()] * len(batch)},
            "clash": lambda: {"a": scores, "a_0": scores[:, 0]},
        }
        return kinds[self.gives]()


class Embeds(Scores):
    """Two views of each sample, from one pass; dropout stays on."""

    def eval_embed(self, model: nn.Module, batch: LaneBatch) -> Any:
        encoded = F.dropout(model[0](self.model_inputs(batch)), 0.3, training=True)
        if self.gives == "only":
            return encoded
        return {"head": model[1:](encoded), "encoder": encoded}


class LabelledPictures(Dataset[tuple[Tensor, int]]):
    """Gray pictures, bright in the row of their class; named as torchvision's folders are."""

    def __init__(self, samples: int, wrong: tuple[int, ...] = ()) -> None:
        self.classes = ["top", "<b>middle</b>", "bottom"]
        self.samples = [(f"{n}.png", n % 3) for n in range(samples)]
        self.wrong = wrong

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = self.samples[index][1]
        picture = torch.zeros(1, 3, 2)
        picture[0, (label + (index in self.wrong)) % 3] = 1 + index / 100
        return picture, label


class Pictured(Scores):
    """Embeds pictures as they are, so that those of a class are next to each other."""

    def train_data(self) -> Any:
        return LabelledPictures(9)

    def valid_data(self) -> Any:
        return LabelledPictures(12, wrong=(4,))

    def predict_data(self, source: str) -> Any:
        return [picture for picture, _ in LabelledPictures(int(source))]

    def eval_embed(self, model: nn.Module, batch: LaneBatch) -> Any:
        x = batch.x if isinstance(batch.data, (tuple, list)) else batch.data
        return x.flatten(1)


class Headed(Scores):
    """Predicts with an extra module, which may count its batches."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.counts = counts

    def extra_modules(self) -> Any:
        self.head = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
        return [self.head]

    def predict(self, model: nn.Module, batch: LaneBatch) -> Any:
        if self.counts:
            self.head[0].num_batches_tracked += 1
        return self.head(super().predict(model, batch))


class Downloaded(Scores):
    """Its model is made of what a download brought, which happens once on a machine."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.file = Path(folder) / "downloaded"

    def prepare_data(self) -> None:
        with self.file.open("a") as file:
            file.write("x")

    def model(self) -> nn.Module:
        assert not self.file.exists() or self.file.read_text() == "x"
        return super().model()
