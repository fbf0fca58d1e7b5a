"""What tests of the batching benchmark share: a profile in round numbers, and visits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from blockflow.bench.batching.blocks import Profiles
from blockflow.bench.batching.peaks import Search
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


def profiles(blocks: Sequence[str], lengths: Sequence[int] = (), slower: float = 1.0) -> Profiles:
    """In turn ``slower`` times as slow as each block by itself."""
    return Profiles(
        [profile(b, lengths=lengths) for b in blocks],
        [profile(b, 10.0 * slower, lengths) for b in blocks],
    )


def searched(limit: float, start: float, probes: int) -> Search:
    """A search that has ended, where every rate up to ``limit`` holds."""
    search = Search(start, probes)
    while not search.done:
        search.tell(search.rate <= limit)
    return search


def cell(*times: float, over: float = 0.0, failed: tuple[str, ...] = ()) -> Cell:
    """A visit in which 10 rows came and were answered per second, and nothing piled up."""
    return Cell(times, len(times) + len(failed), over, 10.0, 0.1, failed, times, 0.0, 10.0)


class FakeClient:
    """Answers at once, or as it is told."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[tuple[str, Any]] = []

    def infer(self, task: str, x: Any, **_: Any) -> Any:
        return self.submit(task, x).result()

    def submit(self, task: str, x: Any, **_: Any) -> Future[Any]:
        self.sent.append((task, x))
        future: Future[Any] = Future()
        if self.error is None:
            future.set_result(x)
        else:
            future.set_exception(self.error)
        return future
