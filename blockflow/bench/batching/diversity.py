"""DVABatch's experiments: diverse loads, lengths and operators, beside ZeroBatch and DelayBatch.

ZeroBatch is ``window`` without a delay; DelayBatch has the delay that serves best near ZeroBatch's
own peak, and is left out where that is none: it is ZeroBatch then. With diverse lengths these two
are there twice: as in the paper, where they pad everything to the longest of a batch, and with the
length classes that DVABatch has too. Classes are an option of every policy, so only the latter tell
what the policy is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any

from blockflow.bench.batching.figures import (
    CANDIDATE,
    DVABATCH_PAPER,
    DVABATCH_PAPER_PEAK,
    note,
)
from blockflow.bench.batching.ladder import Ladder, Rivalry
from blockflow.bench.batching.peaks import CONFIRMING, peak_figures
from blockflow.bench.batching.plan import (
    BOUND_ROWS,
    DELAYED,
    DELAYS,
    DVABATCH,
    DVABATCH_LOADS,
    NONE,
    PLAIN,
    WITH_CLASSES,
    ZERO_CLASSES,
    ZEROBATCH,
    Diversity,
)
from blockflow.bench.batching.rig import Policy
from blockflow.bench.batching.traffic import Cell, poisson
from blockflow.bench.results import Figure
from blockflow.core.errors import TopologyError

_NEAR_PEAK = 0.95
"""Of the base's own peak: where a window's delay is chosen."""
_LATE, _ALIKE = 0.01, 0.05
"""Delays whose late answers, or whose means, lie so near the least are equally good: there the
shortest is taken, for at lower loads all that it does is to cost its length."""
_VISITS = 2
_SEED = 50


def policies(
    diversity: Diversity, delays: Mapping[str, float], *, padded: bool
) -> dict[str, Policy]:
    """The arms.

    Args:
        delays: of the delayed windows, in ms, by the window that they delay; one without a delay
            would be that window again, and is no arm.
        padded: without it only equal lengths share a batch, and nobody has classes.
    """
    rows = diversity.bs_max
    dvabatch: dict[str, Any] = {
        "policy": "dvabatch",
        "bs_max": rows,
        "policies": list(diversity.policies),
    }
    windows: dict[str, dict[str, Any]] = {ZEROBATCH: {"policy": "window", "max_rows": rows}}
    arms: dict[str, Policy] = {}
    if padded and diversity.classes:
        arms[NONE] = {"policy": "none"}
        dvabatch["classes"] = list(diversity.classes)
        windows[ZERO_CLASSES] = {**windows[ZEROBATCH], "classes": list(diversity.classes)}
        windows[ZEROBATCH]["classes"] = [diversity.classes[-1]]
    for name, window in windows.items():
        arms[name] = window
        if delays.get(name):
            arms[DELAYED[name]] = {**window, "max_delay_ms": delays[name]}
    return {**arms, DVABATCH: dvabatch}


def measure(ladder: Ladder, diversity: Diversity) -> list[Figure]:
    """All loads and the peaks."""
    bound_ms = BOUND_ROWS * ladder.alone_ms
    found: list[Figure] = []
    padded = _can_pad(ladder, diversity)
    if diversity.classes and not padded:
        why = "the blocks do not promise padding: only queries of equal length share a batch"
        found.append(note(ladder.experiment, why))
    untuned = policies(diversity, {}, padded=padded)
    windows = [name for name in DELAYED if name in untuned]
    # The last of them pads least: what full batches can serve.
    found += ladder.measure_capacity({"policy": "none"}, untuned[windows[-1]])
    tuning = _tuned(ladder, {name: untuned[name] for name in windows}, bound_ms)
    found += tuning.figures
    arms = policies(diversity, tuning.delays, padded=padded)
    bases = [arm for arm in (*PLAIN, *WITH_CLASSES) if arm in arms]
    shown = [arm for arm in (NONE,) if arm in arms]
    rivalry = Rivalry(DVABATCH, bases, DVABATCH_PAPER, {}, shown, tail=True)
    found += ladder.climb(arms, DVABATCH_LOADS, bound_ms, 1, rivalry)
    starts = {arm: rate for base, rate in tuning.knees.items() for arm in (base, DELAYED[base])}
    starts.setdefault(DVABATCH, tuning.knees[windows[-1]])
    searches = ladder.search("peaks", arms, bound_ms, starts, CONFIRMING)
    goals = {DVABATCH: 1.0}
    found += peak_figures(ladder.experiment, searches, bound_ms, [*bases, *shown], goals)
    for base in windows:
        chose, at = tuning.delays[base], f"at {tuning.knees[base]:.0f}/s near {base}'s own peak"
        text = (
            f"{DELAYED[base]} waits {chose:.1f} ms, the best of {len(DELAYS)} {at}; a query alone "
            f"takes {ladder.alone_ms:.1f} ms"
            if chose
            else f"no delay helps {base} {at}: there is no {DELAYED[base]} apart from it"
        )
        found.append(note(ladder.experiment, text))
    if diversity.lengths:
        gain = (
            f"the paper's largest gain in peak throughput is {DVABATCH_PAPER_PEAK}x, beside "
            "windows that pad to the longest of a batch"
        )
        found.append(note(ladder.experiment, gain))
    return found


def _can_pad(ladder: Ladder, diversity: Diversity) -> bool:
    """Whether the blocks take the classes."""
    if not diversity.classes:
        return False
    policy = policies(diversity, {}, padded=True)[DVABATCH]
    try:
        ladder.rig.apply(ladder.topology(policy))
    except TopologyError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Tuning:
    """Chosen delays.

    Attributes:
        delays: by window, in ms.
        knees: by window, the rate within the bound that its delays were tried near to.
        figures: of all candidates.
    """

    delays: Mapping[str, float]
    knees: Mapping[str, float]
    figures: list[Figure]


def _tuned(ladder: Ladder, windows: Mapping[str, Policy], bound_ms: float) -> Tuning:
    """For each window the delay that serves best where it is about to be too slow itself.

    Far above a window's own peak every delay is late, and which is least so is chance.
    """
    searches = ladder.search("where windows get slow", windows, bound_ms, {}, 0)
    delays: dict[str, float] = {}
    knees: dict[str, float] = {}
    found: list[Figure] = []
    seconds = ladder.plan.probe_seconds(bound_ms)
    for base, window in windows.items():
        search = searches[base]
        # Where no probe held, the knee lies below all of them.
        knees[base] = rate = _NEAR_PEAK * (search.rate if search.holds is None else search.holds)
        tried = {f"{d:g}": d * ladder.alone_ms for d in DELAYS}
        topologies = {
            name: ladder.topology({**window, "max_delay_ms": ms}) for name, ms in tried.items()
        }
        rounds = [poisson(ladder.mix(), rate, seconds, _SEED + i) for i in range(_VISITS)]

        def visit(_arm: str, turn: int, rounds: Any = rounds) -> Cell:
            return ladder.rig.visit(rounds[turn], ladder.inputs, bound_ms)

        what = f"{ladder.experiment}: tuning {DELAYED[base]}"
        cells = ladder.rig.take_turns(what, topologies, _VISITS, visit)
        best = chosen(cells)
        delays[base] = tried[best]
        for name, visits in cells.items():
            times = [t for c in visits for t in c.times_ms]
            labels = {
                "experiment": ladder.experiment,
                "base": base,
                "delay_ms": round(tried[name], 3),
                "rate": round(rate, 3),
                "over": round(100 * late(visits), 2),
                "chosen": name == best,
            }
            mean = sum(times) / len(times) if times else 0.0
            found.append(Figure.of(CANDIDATE, DELAYED[base], mean, "ms", len(times), labels))
    return Tuning(delays, knees, found)


def chosen(cells: Mapping[str, list[Cell]]) -> str:
    """The delay with fewest late answers, to one in a hundred; of equals, that with the least mean,
    to some per cent; of equals, the shortest. ``cells`` are in the order of the delays."""
    fewest = min(late(visits) for visits in cells.values())
    means = {
        name: fmean([t for c in visits for t in c.times_ms] or [inf])
        for name, visits in cells.items()
        if late(visits) <= fewest + _LATE
    }
    return next(name for name, ms in means.items() if ms <= (1 + _ALIKE) * min(means.values()))


def late(cells: list[Cell]) -> float:
    """Share of all queries without an answer within the bound."""
    return sum(c.over * c.offered for c in cells) / sum(c.offered for c in cells)
