"""DVABatch's experiments: diverse loads, lengths and operators, beside ZeroBatch and DelayBatch.

ZeroBatch is ``window`` without a delay; DelayBatch has the delay that answers most queries in time
near the peak. With diverse lengths these two pad to the longest of a batch, DVABatch within
classes.
"""

from __future__ import annotations

from typing import Any

from blockflow.bench.batching.figures import (
    DVABATCH_PAPER,
    DVABATCH_PAPER_PEAK,
    against,
    note,
)
from blockflow.bench.batching.ladder import Ladder
from blockflow.bench.batching.plan import (
    BOUND_ROWS,
    DELAYBATCH,
    DELAYS,
    DVABATCH,
    DVABATCH_LOADS,
    ZEROBATCH,
    Diversity,
)
from blockflow.bench.batching.rig import Policy
from blockflow.bench.results import Figure
from blockflow.bench.simulation.arrivals import Arrival
from blockflow.core.errors import TopologyError

_NEAR_PEAK = 0.95
"""Of the batched capacity: where DelayBatch's window is chosen."""


def policies(diversity: Diversity, delay_ms: float, *, padded: bool) -> dict[str, Policy]:
    """The three arms; without ``padded`` only equal lengths share a batch."""
    rows = diversity.bs_max
    window: dict[str, Any] = {"policy": "window", "max_rows": rows}
    dvabatch: dict[str, Any] = {
        "policy": "dvabatch",
        "bs_max": rows,
        "policies": list(diversity.policies),
    }
    if padded and diversity.classes:
        window["classes"] = [diversity.classes[-1]]
        dvabatch["classes"] = list(diversity.classes)
    delayed = {**window, "max_delay_ms": delay_ms}
    return {ZEROBATCH: window, DELAYBATCH: delayed, DVABATCH: dvabatch}


def measure(ladder: Ladder, diversity: Diversity) -> list[Figure]:
    """All loads and the peaks."""
    bound_ms = BOUND_ROWS * ladder.alone_ms
    found: list[Figure] = []
    padded = _can_pad(ladder, diversity)
    if diversity.classes and not padded:
        why = "the blocks do not promise padding: only queries of equal length share a batch"
        found.append(note(ladder.experiment, why))
    arms = policies(diversity, 0.0, padded=padded)
    found += ladder.measure_capacity({"policy": "none"}, arms[ZEROBATCH])
    delay_ms = _tuned(ladder, diversity, bound_ms, padded)
    arms = policies(diversity, delay_ms, padded=padded)
    figures, visits = ladder.climb(arms, DVABATCH_LOADS, bound_ms, 1)
    found += figures
    for load, share in DVABATCH_LOADS.items():
        labels = ladder.labels(load, share * ladder.batched)
        for base in (ZEROBATCH, DELAYBATCH):
            pair = visits[load, DVABATCH], visits[load, base]
            found += against(DVABATCH, pair[0], base, pair[1], labels, DVABATCH_PAPER, {})
    found += ladder.peaks(arms, bound_ms, ZEROBATCH)
    text = f"DelayBatch waits {delay_ms:.1f} ms; a query alone takes {ladder.alone_ms:.1f} ms"
    found.append(note(ladder.experiment, text))
    if diversity.lengths:
        gain = f"the paper's largest gain in peak throughput is {DVABATCH_PAPER_PEAK}x"
        found.append(note(ladder.experiment, gain))
    return found


def _can_pad(ladder: Ladder, diversity: Diversity) -> bool:
    """Whether the blocks take the classes."""
    if not diversity.classes:
        return False
    policy = policies(diversity, 0.0, padded=True)[DVABATCH]
    try:
        ladder.rig.apply(ladder.topology(policy))
    except TopologyError:
        return False
    return True


def _tuned(ladder: Ladder, diversity: Diversity, bound_ms: float, padded: bool) -> float:
    """The delay with most answers in time near the peak; of equals, the shortest."""
    delays = {f"{d:g}": d * ladder.alone_ms for d in DELAYS}
    topologies = {
        name: ladder.topology(policies(diversity, ms, padded=padded)[DELAYBATCH])
        for name, ms in delays.items()
    }
    queries = ladder.queries(_NEAR_PEAK * ladder.batched, seed=50)

    def visit(_arm: str, _turn: int, queries: list[Arrival] = queries) -> float:
        return ladder.rig.visit(queries, ladder.inputs, bound_ms).over

    what = f"{ladder.experiment}: tuning DelayBatch"
    over = ladder.rig.take_turns(what, topologies, 1, visit)
    return delays[min(delays, key=lambda name: (round(over[name][0], 3), delays[name]))]
