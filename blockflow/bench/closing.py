"""Closing: for ``with``, what has a ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Closed at the end of a ``with``, however that ends."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
