"""What is decomposed: for each experiment a model, its data, and what it was trained for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from stories import WORDS, stories
from targets import LanguageModel, ResidualMlp, ToyModel
from torch import Tensor, nn
from torch.nn import functional as F

from samestep.errors import TaskError

PROBE = 0.75
"""How large a feature is where importances are looked at one feature at a time."""


class Experiment(ABC):
    error: Literal["mse", "kl"]
    """By which outputs are compared."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Return the model, with new weights."""

    @abstractmethod
    def draw(self, generator: torch.Generator, size: int) -> Tensor:
        """Inputs of the model."""

    @abstractmethod
    def target_loss(self, model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
        """Return what the model is trained for, summed, and its count."""

    def probes(self) -> Tensor | None:
        """Return an input for each feature alone; None if there are none."""
        return None


def sparse_features(generator: torch.Generator, size: int, features: int, probability: float, low: float) -> Tensor:
    """Features that are 0, but for a few: those are uniform from low to 1."""
    values = low + (1 - low) * torch.rand(size, features, generator=generator)
    return values * (torch.rand(size, features, generator=generator) < probability)


class ToyModels(Experiment):
    """A toy model of superposition, which gives back its sparse input."""

    error = "mse"

    def __init__(self, features: int = 5, hidden: int = 2, probability: float = 0.05) -> None:
        self._features, self._hidden, self._probability = features, hidden, probability

    def network(self) -> ToyModel:
        return ToyModel(self._features, self._hidden)

    def draw(self, generator: torch.Generator, size: int) -> Tensor:
        return sparse_features(generator, size, self._features, self._probability, low=0.0)

    def target_loss(self, model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
        return F.mse_loss(model(x), x.abs(), reduction="sum"), x.numel()

    def probes(self) -> Tensor:
        return PROBE * torch.eye(self._features)


class ResidualMlps(Experiment):
    """A residual MLP that adds the ReLU of each feature to it."""

    error = "mse"

    def __init__(
        self, features: int = 20, embedded: int = 200, neurons: int = 10, layers: int = 1, probability: float = 0.05
    ) -> None:
        self._sizes = (features, embedded, neurons, layers)
        self._features, self._probability = features, probability

    def network(self) -> ResidualMlp:
        return ResidualMlp(*self._sizes)

    def draw(self, generator: torch.Generator, size: int) -> Tensor:
        return sparse_features(generator, size, self._features, self._probability, low=-1.0)

    def target_loss(self, model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
        return F.mse_loss(model(x), F.relu(x) + x, reduction="sum"), x.numel()

    def probes(self) -> Tensor:
        return PROBE * torch.eye(self._features)


class Language(Experiment):
    """A small transformer that has read made-up stories."""

    error = "kl"

    def __init__(self, length: int = 24, width: int = 32, heads: int = 2, layers: int = 2) -> None:
        if width % heads:
            raise TaskError(f"params.sizes: width is {width}, which {heads} heads do not divide")
        self._length, self._sizes = length, (length, width, heads, layers)

    def network(self) -> LanguageModel:
        return LanguageModel(len(WORDS), *self._sizes)

    def draw(self, generator: torch.Generator, size: int) -> Tensor:
        seed = int(torch.randint(2**62, (), generator=generator))
        return torch.from_numpy(stories(np.random.default_rng(seed), size, self._length))

    def target_loss(self, model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
        return next_word_loss(model(x), x)


def next_word_loss(logits: Tensor, tokens: Tensor) -> tuple[Tensor, float]:
    """Cross-entropy of each next word, summed, and how many there are."""
    wanted = tokens[:, 1:]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten(), reduction="sum")
    return loss, wanted.numel()


_EXPERIMENTS: Mapping[str, Callable[..., Experiment]] = {
    "tms": ToyModels,
    "residual_mlp": ResidualMlps,
    "language": Language,
}


def experiment_of(name: str, sizes: Mapping[str, Any]) -> Experiment:
    """Return the experiment that a config names."""
    if name not in _EXPERIMENTS:
        raise TaskError(f"params.experiment is {name!r}: give {', '.join(_EXPERIMENTS)}")
    try:
        return _EXPERIMENTS[name](**sizes)
    except TypeError as error:
        raise TaskError(f"params.sizes does not fit {name}: {error}") from None
