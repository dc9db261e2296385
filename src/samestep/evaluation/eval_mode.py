"""A run's modules in evaluation mode, and whether their buffers stay as they are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from samestep.errors import TaskError
from samestep.pytree import same_bits


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode for all of them, and afterwards each submodule's own mode again."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


class _Buffer(NamedTuple):
    owner: nn.Module
    """The submodule it is a buffer of."""
    key: str
    """Its name there."""
    tensor: Tensor


class BufferSnapshot:
    """The buffers of a run's modules, as they are when this is made.

    They are followed by their names: `self.mean = 0.9 * self.mean + ...` makes a tensor of its own.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = _buffers(modules)
        self._copies = {name: at.tensor.clone() for name, at in self._before.items()}

    def changed(self) -> list[str]:
        """Return the names of those that have other bits now, of which module, and its class.

        A buffer that no checkpoint keeps may get another size, as a cache of positions does.
        """
        now = _buffers(self._modules)
        return [
            f"{name} ({type(owner).__name__})"
            for name, (owner, key, _) in {**self._before, **now}.items()
            if not self._is_same(name, now.get(name), key in owner._non_persistent_buffers_set)
        ]

    def _is_same(self, name: str, now: _Buffer | None, is_cache: bool) -> bool:
        if name not in self._before or now is None:
            return is_cache
        before = self._copies[name]
        return same_bits(now.tensor, before) or (is_cache and now.tensor.shape != before.shape)

    def restore(self) -> None:
        """Put them back as they were, each into the tensor that held it."""
        for name, (owner, key, tensor) in self._before.items():
            tensor.copy_(self._copies[name])
            owner._buffers[key] = tensor


def refuse_changed(by_rank: Iterable[Sequence[str]], during: str) -> None:
    """Raise on all ranks if a buffer changed on any of them.

    Raises:
        TaskError: Naming the buffers.
    """
    changed = sorted({name for names in by_rank for name in names})
    if changed:
        raise TaskError(
            f"{during} changed buffers in evaluation mode: {', '.join(changed)}. Each rank sees "
            "other samples there, so the ranks would drift apart: let forward change them only if "
            "self.training"
        )


def _buffers(modules: Sequence[nn.Module]) -> dict[str, _Buffer]:
    """Return all buffers, by full name."""
    found = {}
    for number, module in enumerate(modules):
        label = "model" if number == 0 else f"extra module {number}"
        for path, owner in module.named_modules():
            for key, tensor in owner._buffers.items():
                if tensor is not None:
                    found[".".join(filter(None, (label, path, key)))] = _Buffer(owner, key, tensor)
    return found
