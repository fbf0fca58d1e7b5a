"""Decoder: something that turns foreign bytes into values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decoder:
    """A function that takes bytes, and frames that it takes without a complaint.

    It raises a BlockFlowError, or what ``errors`` names besides, and nothing else.
    """

    decode: Callable[[bytes], object]
    valid: Sequence[bytes]
    errors: tuple[type[Exception], ...] = ()
