"""scikit-learn's digits with a small convolutional net: BatchNorm, dropout, augmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

from samestep import LaneBatch, Schedule, Task

if TYPE_CHECKING:
    from torchmetrics import Metric

CLASSES = 10


class DigitImages(Dataset[tuple[Tensor, int]]):
    """8x8 images; `augment` shifts each by up to a pixel and adds noise, different each time."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, augment: bool) -> None:
        self._images = torch.from_numpy(images.astype(np.float32) / 16.0).unsqueeze(1)
        self._labels = labels
        self._augment = augment

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self._images[index]
        if self._augment:
            shift = np.random.randint(-1, 2, size=2)
            image = torch.roll(image, shifts=(int(shift[0]), int(shift[1])), dims=(1, 2))
            image = image + 0.05 * torch.randn_like(image)
        return image, int(self._labels[index])


class Net(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width * 16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.features(images).flatten(1)))


class Digits(Task):
    def __init__(self, width: int = 16, dropout: float = 0.25, lr: float = 8e-3) -> None:
        self.width, self.dropout, self.lr = width, dropout, lr
        digits = load_digits()
        # Every fifth sample is for validation: a fixed split without a random draw.
        held_out = np.arange(len(digits.images)) % 5 == 0
        self._train = digits.images[~held_out], digits.target[~held_out]
        self._valid = digits.images[held_out], digits.target[held_out]

    def model(self) -> nn.Module:
        return Net(self.width, self.dropout)

    def train_data(self) -> DigitImages:
        return DigitImages(*self._train, augment=True)

    def valid_data(self) -> DigitImages:
        return DigitImages(*self._valid, augment=False)

    def optimizers(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=self.lr, weight_decay=0.01)

    def schedules(self, optimizers: Sequence[Optimizer], steps: int | None) -> Schedule:
        assert steps is not None, "the digits dataset has a length"
        return Schedule(CosineAnnealingLR(optimizers[0], T_max=steps))

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)

    def metrics(self) -> Mapping[str, Metric]:
        # Imported when it is first evaluated: torchmetrics takes seconds to import.
        from torchmetrics.classification import MulticlassAccuracy

        return {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Metric]) -> tuple[Tensor, int]:
        logits = model(batch.x)
        metrics["accuracy"].update(logits, batch.y)
        return F.cross_entropy(logits, batch.y, reduction="sum"), len(batch)
