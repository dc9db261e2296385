"""Kinds of data, orders and draws."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from samestep import orders
from tests.distributed import tasks
from tests.sameness.models.base import SAMPLES, Classify, points


class Noisy(tasks.Noisy):
    """Augments with draws from Python, NumPy and torch."""

    def __init__(self, samples: int) -> None:
        self.x, self.y = points(samples)


class Augmented(Classify):
    def train_data(self) -> Any:
        return Noisy(self.samples)


class MixedInCollate(Augmented):
    """CutMix in the collate function: it draws for the whole lane."""

    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        taken = torch.rand_like(x) < np.random.beta(1.0, 1.0)
        return torch.where(taken, x[torch.randperm(len(x))], x), y


class Remembered(Noisy):
    """The mistake: what it drew for a sample once, it keeps."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class CachedAugmentation(Classify):
    def train_data(self) -> Any:
        return Remembered(self.samples)


class OwnGenerator(Noisy):
    """The mistake: a generator that lives as long as the dataset."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.from_numpy(self.rng.normal(size=self.x.shape[1])).float()
        return self.x[index] + 0.1 * noise, self.y[index]


class DatasetGenerator(Classify):
    def train_data(self) -> Any:
        return OwnGenerator(self.samples)


class PlainIterable(IterableDataset[tuple[Tensor, Tensor]]):
    """Iterable, and does not say how its samples are shared by the lanes."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(*points(), strict=True))


class WithoutLaneStreams(Classify):
    def train_data(self) -> Any:
        return PlainIterable()


class Weighted(Augmented):
    """Samples are drawn with replacement, by their weights."""

    def order(self, dataset: Any) -> Any:
        return orders.weighted((dataset.y + 1).tolist())


class Grouped(Augmented):
    """Samples of one class stay together."""

    def order(self, dataset: Any) -> Any:
        return orders.grouped(dataset.y.tolist())


class Streamed(Classify):
    def train_data(self) -> Any:
        return tasks.Stream(0.1, points)


class CountingStreams:
    def lane_stream(self, lane: int, lanes: int, seed: int, epoch: int) -> tasks.CountingStream:
        return tasks.CountingStream(*points(SAMPLES + 7 * epoch), lane, lanes)


class StatefulStreamed(Classify):
    def train_data(self) -> Any:
        return CountingStreams()


class HuggingFaceStream(Classify):
    """An iterable dataset of Hugging Face, shuffled in a buffer."""

    def train_data(self) -> Any:
        import datasets

        x, y = points()
        rows = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})
        return rows.to_iterable_dataset(num_shards=4).shuffle(seed=5, buffer_size=16)

    def collate(self, samples: list[Any]) -> Any:
        x, y = ([sample[name] for sample in samples] for name in ("x", "y"))
        return torch.tensor(x), torch.tensor(y)
