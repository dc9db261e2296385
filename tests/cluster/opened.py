"""One way to be open inside a `with`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

Open = TypeVar("Open", bound="Opened")


class Opened(ABC):
    """What is open inside a `with`, and closed again also when only half of it came up."""

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: Open) -> Open:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
