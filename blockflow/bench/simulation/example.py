"""Made-up profiles, so that the simulator can be tried before anything is measured.

They have the shapes that matter to batching policies, not the times of any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from blockflow.core.profile import Point, StageProfile

NOTICE = "made-up profiles: shapes of real models, times of no machine"
MACHINE = "made-up"
_MOST = 32
_ALONE: Mapping[int, float] = {1: 1.0}
_GAINS: Mapping[int, float] = {1: 1.0, 2: 1.6}
"""Threads of a forward -> how many times as fast it is."""

_RUNS = 100
_SPREAD = 0.02


def example_profiles() -> tuple[StageProfile, ...]:
    """A network of four blocks: three whose rows cost the same in any batch, and a fully connected
    head that reads its weights once per batch, so that 32 rows cost little more than one. A second
    thread gives less than a second core is worth."""
    return (
        made_up("stem", lambda rows: 0.4 + 3.6 * rows, gains=_GAINS),
        made_up("middle", lambda rows: 0.5 + 3.1 * rows, gains=_GAINS),
        made_up("deep", lambda rows: 0.8 + 2.2 * rows, gains=_GAINS),
        made_up("head", lambda rows: 12.0 + 0.9 * rows, gains=_GAINS),
    )


def made_up(
    block: str,
    ms: Callable[[int], float],
    most: int = _MOST,
    gains: Mapping[int, float] = _ALONE,
) -> StageProfile:
    """A profile with these times at 1, 2, 4, ... ``most`` rows.

    Args:
        ms: rows -> milliseconds with one thread.
        most: rows.
        gains: threads -> how many times as fast they are.
    """
    points = tuple(
        _point(threads, rows, ms(rows) / gain)
        for threads, gain in gains.items()
        for rows in _rows(most)
    )
    return StageProfile(block, "0" * 64, "example", "fp32", MACHINE, points)


def _point(threads: int, rows: int, ms: float) -> Point:
    return Point(
        threads=threads,
        rows=rows,
        length=None,
        runs=_RUNS,
        mean_ms=ms,
        p50_ms=ms,
        p90_ms=ms * 1.04,
        p99_ms=ms * 1.08,
        low_ms=ms * 0.998,
        high_ms=ms * 1.002,
        spread=_SPREAD,
        outliers=0,
    )


def _rows(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
