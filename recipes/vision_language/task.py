"""The model, its optimizer and its data: what train.py trains with, and `samestep train` or `verify` too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from networks import Captioner, loss_of
from pictures import draw, tokens_of
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from samestep import Generated, LaneBatch, Schedule, Task


def get_batch(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """Pictures and the tokens of their captions; none of these is held out."""
    seed = int(torch.randint(2**62, (), generator=generator))
    pictures, captions = draw(np.random.default_rng(seed), size)
    return torch.from_numpy(pictures), torch.from_numpy(tokens_of(captions))


class Captions(Task):
    def __init__(
        self,
        dim: int = 48,
        heads: int = 2,
        vision_layers: int = 1,
        text_layers: int = 1,
        lr: float = 3e-3,
        warmup: int = 100,
    ) -> None:
        self._sizes = {"dim": dim, "heads": heads, "vision_layers": vision_layers, "text_layers": text_layers}
        self._lr, self._warmup = lr, warmup

    def model(self) -> Captioner:
        return Captioner(**self._sizes)

    def train_data(self) -> Generated:
        return Generated(get_batch)

    def optimizers(self, model: nn.Module) -> Optimizer:
        # Fused: on a GPU nothing waits to learn whether a step overflowed.
        return AdamW(model.parameters(), lr=self._lr, weight_decay=0.01, fused=True)

    def schedules(self, optimizers: Sequence[Optimizer], steps: int | None) -> Schedule:
        """Return a rise over the warm-up, then half a cosine."""
        assert steps is not None, "the config sets the steps"

        def factor(step: int) -> float:
            return min((step + 1) / self._warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))

        return Schedule(LambdaLR(optimizers[0], factor))

    def loss(self, model: nn.Module, batch: LaneBatch) -> tuple[Tensor, Tensor]:
        pictures, tokens = batch.data
        return loss_of(model(pictures, tokens[:, :-1]), tokens)
