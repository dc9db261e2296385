"""Let a script and its port see the same numbers, and save the weights that they end with.

Imported first by both. Nothing is shuffled or dropped, and what is drawn follows from its shape, so that the
only difference left is the loop. The weights go to the file that EQUAL names.
"""

import atexit
import os
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
sys.modules["fakes"] = types.ModuleType("fakes")  # its data are drawn

_trained: list[Tensor] = []
_randn, _rand, _randint = torch.randn, torch.rand, torch.randint
_make_loader, _make_optimizer = DataLoader.__init__, torch.optim.Optimizer.__init__


def wave(shape: Sequence[Any], scale: float = 1.0) -> Tensor:
    """Return numbers that follow from a shape."""
    sizes = [int(size) for size in shape]
    at = torch.arange(int(np.prod(sizes)), dtype=torch.float64)
    return (torch.sin(at * 0.7 + 0.3) * scale).float().reshape(sizes)


def _ordered_loader(self: DataLoader[Any], *args: Any, **options: Any) -> None:
    if options.get("shuffle"):
        options["shuffle"] = False
    if options.get("sampler") is not None:
        options["sampler"] = None
    _make_loader(self, *args, **options)


@torch.no_grad()
def _optimizer_of_set_weights(self: torch.optim.Optimizer, params: Any, defaults: Any) -> None:
    _make_optimizer(self, params, defaults)
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(self).values()):
        return  # around another one, whose weights are set already
    for param in (param for group in self.param_groups for param in group["params"]):
        if any(param is known for known in _trained):
            continue
        _trained.append(param)
        if param.dim() > 1:
            param.copy_(wave(param.shape, (1.0 / param[0].numel()) ** 0.5))
        else:
            param.copy_(wave(param.shape, 0.05) + float(param.float().mean() >= 0.5))


def _shape(size: Any) -> Any:
    return size[0] if len(size) == 1 and not isinstance(size[0], int) else size


def _fixed_randn_like(x: Tensor, **options: Any) -> Tensor:
    of = getattr(x, "per_lane", [x])[0]
    at = torch.arange(of.numel(), dtype=x.dtype).reshape(of.shape) * 0.7
    return torch.sin(at + 0.3 + x * 0)


def _fixed_randint(*args: Any, low: Any = None, high: Any = None, size: Any = None, **options: Any) -> Tensor:
    if size is None:
        args, size = args[:-1], args[-1]
    if high is None:
        low, high = (args[0] if len(args) > 1 else 0), args[-1]
    low = int(low or 0)
    kept = {name: value for name, value in options.items() if name == "device"}
    at = torch.arange(int(np.prod([int(s) for s in size]))) * 7 + 3
    values = at.remainder(int(high) - low).reshape([int(s) for s in size])
    return _randint(0, 2, size, **kept) * 0 + values + low


class _Made(Dataset[Any]):
    def __init__(self, size: int, shape: tuple[int, int, int], has_two_views: bool) -> None:
        self._size, self._shape, self._has_two_views = size, shape, has_two_views

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if index >= self._size:
            raise IndexError(index)
        x = wave(self._shape, 0.5 + index / self._size)
        return ((x, x.flip(-1)) if self._has_two_views else x), index % 10


def _made(size: int, shape: tuple[int, int, int], has_two_views: bool = False) -> Callable[..., _Made]:
    return lambda *args, **options: _Made(size, shape, has_two_views)


DataLoader.__init__ = _ordered_loader  # type: ignore[method-assign]
torch.optim.Optimizer.__init__ = _optimizer_of_set_weights  # type: ignore[method-assign]
nn.Dropout.forward = lambda self, x: x  # type: ignore[method-assign]
nn.functional.dropout = lambda x, *args, **options: x
torch.randn = lambda *size, **options: _randn(*size, **options) * 0 + wave(_shape(size))
torch.rand = lambda *size, **options: _rand(*size, **options) * 0 + wave(_shape(size), 0.5) + 0.5
torch.randn_like = _fixed_randn_like
torch.randint = _fixed_randint
torch.multinomial = lambda p, count, *args, **options: p.argmax(-1, keepdim=True)
np.random.shuffle = lambda x: None
np.random.random = lambda size=None: 0.5 if size is None else wave(size, 0.5).numpy() + 0.5
np.random.normal = lambda mean, deviation, size: wave(size).numpy()
random.random = lambda: 0.5
torchvision.datasets.MNIST = _made(48, (1, 28, 28))
torchvision.datasets.CIFAR10 = _made(48, (3, 32, 32))
torchvision.datasets.STL10 = _made(32, (3, 32, 32), has_two_views=True)
torchvision.datasets.ImageFolder = _made(28, (3, 64, 64))
torchvision.datasets.FakeData = lambda **options: _Made(48, (3, 64, 64), False)
atexit.register(lambda: torch.save([p.detach().clone() for p in _trained], os.environ["EQUAL"]))
