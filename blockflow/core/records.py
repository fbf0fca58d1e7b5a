"""Records: small values that nobody changes, made for every request. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """``@dataclass(frozen=True, slots=True)`` to whoever reads and checks the code, which is where
    a change is refused. A dataclass that refuses it itself writes each of its fields by a call of
    ``object.__setattr__``, and costs several times as much to make."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
