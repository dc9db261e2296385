"""Small made-up image sets in place of those that the scripts download."""

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torchvision.datasets import FakeData

torch.set_num_threads(1)


def _of_size(size: int, shape: tuple[int, int, int]) -> Callable[..., FakeData]:
    def make(*args: Any, transform: Any = None, **options: Any) -> FakeData:
        return FakeData(size, shape, 10, transform)

    return make


torchvision.datasets.MNIST = _of_size(52, (1, 28, 28))
torchvision.datasets.CIFAR10 = _of_size(52, (3, 32, 32))
torchvision.datasets.STL10 = _of_size(28, (3, 32, 32))
torchvision.datasets.ImageFolder = _of_size(28, (3, 32, 32))
