"""A DataLoader as `run.prepare` gives it back: a loop over it gets this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


class RunLoader:
    """The loader, with another way to iterate it; all else is the loader's own."""

    def __init__(self, loader: DataLoader[Any], batches: Callable[[DataLoader[Any]], Iterator[Any]]) -> None:
        self.loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.loader)

    def __len__(self) -> int:
        """Return the batches of the loader itself, at any number of ranks."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def is_bar_over_loader(data: Any) -> bool:
    """Return whether iterating it iterates a loader of a run, as with `tqdm(loader)`."""
    return isinstance(getattr(data, "iterable", None), RunLoader)


def unwrapped(data: Any) -> Any:
    """Return what a run reads: of its own loaders, the person's."""
    return data.loader if isinstance(data, RunLoader) else data
