"""Batch sizes of a run: what the workers counted while it was under way, by REST."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from blockflow.bench.demo.server import Rest
from blockflow.core.errors import BlockFlowError

EVERY_S = 1.0
"""Between two looks: they are to disturb nothing."""

CATCH_UP_S = 1.0
"""What the workers tell comes a quarter of a second late; so long is waited for the rest."""

_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Count:
    """Requests, rows and batches."""

    requests: int = 0
    rows: int = 0
    batches: int = 0

    def plus(self, other: Count, sign: int = 1) -> Count:
        """The sum, or with -1 the difference."""
        return Count(
            self.requests + sign * other.requests,
            self.rows + sign * other.rows,
            self.batches + sign * other.batches,
        )


_NONE = Count()

Counted = Mapping[tuple[str, str, int], Count]
"""Block, worker and incarnation -> what it has counted since its start."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """A block's batches in a run.

    Attributes:
        batches, rows: in the run, over all replicas.
        looks: mean rows of a batch, look by look, where there were any.
    """

    block: str
    batches: int
    rows: int
    looks: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        return self.rows / self.batches

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": self.mean}


class BatchWatch:
    """Reads the workers' counters while a run is under way.

    Args:
        rest: of the system; None: nothing is known.
        now: the clock, in seconds.
    """

    def __init__(self, rest: Rest | None, now: Callable[[], float] = time.monotonic) -> None:
        self._rest = rest
        self._now = now
        self._looks: list[Counted] = []
        self._last = float("-inf")
        self.look(False)

    def look(self, begun: bool) -> None:
        """Read them, if the last time is long enough ago. A system that is gone tells nothing.

        Until the run has ``begun`` what is read is what it begins with: the workers may still tell
        of requests before it.
        """
        if not begun:
            self._looks.clear()
        if not begun or self._now() - self._last >= EVERY_S:
            self._read()

    def _read(self) -> None:
        self._last = self._now()
        if self._rest is None:
            return
        try:
            self._looks.append(_counted(self._rest.get("/v1/workers")))
        except (BlockFlowError, KeyError, TypeError, ValueError, AttributeError):
            # Gone, or it tells something else. Asked again, it might hold up the run's own watch.
            self._rest = None

    def finish(self, requests: Mapping[str, int]) -> tuple[BatchSizes, ...]:
        """What was counted since the begin, when each block has counted as many requests."""
        self._read()
        until = self._now() + CATCH_UP_S
        while len(self._looks) > 1 and self._now() < until:
            grown = _growth(self._looks[0], self._looks[-1])
            if all(grown.get(block, _NONE).requests >= n for block, n in requests.items()):
                break
            time.sleep(_PAUSE_S)
            self._looks.pop()
            self._read()
        if len(self._looks) < 2:
            return ()
        steps = [_growth(a, b) for a, b in zip(self._looks, self._looks[1:], strict=False)]
        whole = _growth(self._looks[0], self._looks[-1])
        return tuple(
            BatchSizes(
                block,
                whole[block].batches,
                whole[block].rows,
                tuple(
                    s[block].rows / s[block].batches for s in steps if s.get(block, _NONE).batches
                ),
            )
            for block in requests
            if block in whole and whole[block].batches
        )


def _counted(answer: Mapping[str, Any]) -> Counted:
    return {
        (str(s["block"]), str(w["name"]), int(w["incarnation"])): Count(
            int(s["kpi"]["requests"]),
            int(s["kpi"]["rows"]) + int(s["kpi"].get("failed_rows", 0)),
            int(s["kpi"]["batches"]),
        )
        for w in answer["workers"]
        for s in w["stages"]
        if s["kpi"]
    }


def _growth(before: Counted, after: Counted) -> dict[str, Count]:
    """By block. A worker that came in between counts from zero, one that went not at all."""
    sums: dict[str, Count] = {}
    for key, found in after.items():
        grown = found.plus(before.get(key, _NONE), -1)
        sums[key[0]] = sums.get(key[0], _NONE).plus(grown)
    return sums
