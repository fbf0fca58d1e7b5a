"""What tests of the batching benchmark share: a profile in round numbers, and visits."""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.bench.batching.traffic import Cell
from blockflow.core.model import TensorSpec
from blockflow.core.profile import Point, StageProfile

SPEC = TensorSpec("float32", ("rows", 4))


def profile(block: str, ms: float = 10.0, lengths: Sequence[int] = ()) -> StageProfile:
    """Half of a row's time is for the batch as a whole; the length does not matter."""
    points = tuple(
        Point(1, b, length, 30, t, t, t, t, t, t, 0.0, 0)
        for length in lengths or (None,)
        for b in (1, 2, 4, 8, 16, 32)
        for t in [ms * (1 + b) / 2]
    )
    return StageProfile(block, "0" * 64, "exported", "fp32", "here", points)


def cell(*times: float, over: float = 0.0, failed: tuple[str, ...] = ()) -> Cell:
    return Cell(times, len(times) + len(failed), over, 10.0, 0.1, failed)
