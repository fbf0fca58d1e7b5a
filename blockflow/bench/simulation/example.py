"""Made-up profiles, so that the simulator can be tried before anything is measured.

They have the shapes that matter to batching policies, not the times of any machine.
"""

from __future__ import annotations

from collections.abc import Callable

from blockflow.core.profile import Point, StageProfile

NOTICE = "made-up profiles: shapes of real models, times of no machine"
MACHINE = "made-up"
_MOST = 32
_RUNS = 100
_SPREAD = 0.02


def example_profiles() -> tuple[StageProfile, ...]:
    """A network of four blocks: three whose rows cost the same in any batch, and a fully connected
    head that reads its weights once per batch, so that 32 rows cost little more than one."""
    return (
        made_up("stem", lambda rows: 0.4 + 3.6 * rows),
        made_up("middle", lambda rows: 0.5 + 3.1 * rows),
        made_up("deep", lambda rows: 0.8 + 2.2 * rows),
        made_up("head", lambda rows: 12.0 + 0.9 * rows),
    )


def made_up(block: str, ms: Callable[[int], float], most: int = _MOST) -> StageProfile:
    """A profile with these times at 1, 2, 4, ... ``most`` rows."""
    points = tuple(
        Point(
            threads=1,
            rows=rows,
            length=None,
            runs=_RUNS,
            mean_ms=ms(rows),
            p50_ms=ms(rows),
            p90_ms=ms(rows) * 1.04,
            p99_ms=ms(rows) * 1.08,
            low_ms=ms(rows) * 0.998,
            high_ms=ms(rows) * 1.002,
            spread=_SPREAD,
            outliers=0,
        )
        for rows in _rows(most)
    )
    return StageProfile(block, "0" * 64, "example", "fp32", MACHINE, points)


def _rows(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
