"""What one seed's run has found, as plain data, so that another process can tell it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from blockflow.bench.faultsim.faults import KINDS
from blockflow.bench.faultsim.judge import RULES
from blockflow.bench.faultsim.world import World
from blockflow.bench.results import Figure
from blockflow.bench.simulation.watch import InvariantBroken


@dataclass(slots=True)
class Found:
    """One run.

    Attributes:
        seed, hours: which run; hours are those that have passed in it.
        requests, episodes, events: how many.
        faults: by kind.
        rule, what: the invariant that was broken, and how; '' = none was.
        trace: what had happened before.
        took_s: real seconds.
    """

    seed: int
    hours: float
    requests: int = 0
    episodes: int = 0
    events: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    rule: str = ""
    what: str = ""
    trace: list[str] = field(default_factory=list)
    took_s: float = 0.0


def run_seed(seed: int, hours: float, kinds: Sequence[str] = KINDS) -> Found:
    """Run one seed with faults of these kinds; a broken invariant is told, not raised."""
    begin = time.perf_counter()
    world = World(seed, hours, kinds)
    rule = what = ""
    trace: list[str] = []
    try:
        world.run()
    except InvariantBroken as exc:
        rule, what, trace = exc.rule, str(exc), list(world.trace)
    return Found(
        seed,
        world.now / 3.6e12,
        world.clients.asked,
        world.episodes,
        world.loop.events,
        dict(world.clients.outcomes),
        dict(world.faults.done + world.network.happened),
        rule,
        what,
        trace,
        time.perf_counter() - begin,
    )


def figures(found: Iterable[Found]) -> list[Figure]:
    """The sums over all seeds, for the result file."""
    runs = list(found)
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    broken: Counter[str] = Counter(r.rule for r in runs if r.rule)
    for run in runs:
        outcomes.update(run.outcomes)
        faults.update(run.faults)
    n = len(runs)

    def figure(name: str, mode: str, value: float, unit: str) -> Figure:
        return Figure.of(name, mode, value, unit, n)

    known = dict.fromkeys((*KINDS, *sorted(faults)))
    return [
        figure("virtual time", "all", sum(r.hours for r in runs), "h"),
        figure("real time", "all", sum(r.took_s for r in runs), "s"),
        figure("events", "all", sum(r.events for r in runs), ""),
        figure("requests", "all", sum(r.requests for r in runs), ""),
        *(figure("requests", how, count, "") for how, count in outcomes.most_common()),
        figure("faults", "all", faults.total(), ""),
        *(figure("faults", kind, faults[kind], "") for kind in known),
        figure("violations", "all", broken.total(), ""),
        *(figure("violations", rule, broken[rule], "") for rule in RULES),
    ]
