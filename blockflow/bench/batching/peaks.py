"""Peaks: the highest rate that an arm answers within a latency bound, confirmed by a second probe.

A probe at a rate holds if all its queries are answered, the 99th percentile keeps the bound, over
all of it and over its later half, and the number under way does not grow. It is long beside the
bound (``probe_bounds`` of the plan): in a short one a queue can grow all the time and still be
within it at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from blockflow.bench.batching.figures import PEAK, PEAK_RATIO, note, ratio_figure
from blockflow.bench.batching.plan import rotated
from blockflow.bench.batching.rig import Rig, Topology
from blockflow.bench.batching.traffic import Cell
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import Interval, percentile

GROWTH_LIMIT = 0.05
"""By no more of what comes may the number under way grow. In simulated probes of twenty bounds none
grew by more that came at less than the capacity; at 1.06 times the capacity one in twelve held."""
FACTOR = 1.3
CONFIRMING = 4
"""Probes at most that a search may add to those that were planned, to confirm what it has found."""
_HELD = 2
_SEED = 100


def within(cell: Cell, bound_ms: float) -> bool:
    """Whether a probe held."""
    if cell.failed or not cell.times_ms or not cell.later_ms:
        return False
    late = max(percentile(cell.times_ms, 99), percentile(cell.later_ms, 99))
    return late <= bound_ms and cell.growth <= GROWTH_LIMIT


class Search:
    """The highest rate that holds: steps by a factor until it is bracketed, then halves, and at
    last probes what it has found again.

    A rate above one that has failed counts no more, however often it held.

    Args:
        start: the first rate to try.
        probes: before the found rate is confirmed.
        confirming: further ones at most, until a rate has held twice.
        factor: of the steps.
    """

    def __init__(
        self, start: float, probes: int, confirming: int = CONFIRMING, factor: float = FACTOR
    ) -> None:
        self._next = start
        self._probes = probes
        self._most = probes + confirming
        self._factor = factor
        self._held: Counter[float] = Counter()
        self.fails: float | None = None
        self.made = 0

    @property
    def holds(self) -> float | None:
        """The highest rate that held, below all that failed."""
        below = [r for r in self._held if self.fails is None or r < self.fails]
        return max(below, default=None)

    @property
    def confirmed(self) -> bool:
        """Whether that rate held in a second probe."""
        return self.holds is not None and self._held[self.holds] >= _HELD

    @property
    def done(self) -> bool:
        enough = self.made >= self._probes and self.confirmed and self.fails is not None
        return enough or self.made >= self._most

    @property
    def rate(self) -> float:
        """What to try next."""
        again = self.made >= self._probes and not self.confirmed
        return self.holds if again and self.holds is not None else self._next

    def tell(self, held: bool) -> None:
        """What became of :attr:`rate`."""
        rate = self.rate
        self.made += 1
        if held:
            self._held[rate] += 1
        elif self.fails is None or rate < self.fails:
            self.fails = rate
        low = self.holds
        if low is None:
            self._next = (rate if self.fails is None else self.fails) / self._factor
        elif self.fails is None:
            self._next = low * self._factor
        else:
            self._next = (low * self.fails) ** 0.5

    @property
    def found(self) -> Interval | None:
        """The highest rate that held, up to the lowest that did not, and from how many probes;
        None: none held."""
        low = self.holds
        if low is None:
            return None
        return Interval(low, low, self.fails or low * self._factor, self.made)


def search_peaks(
    rig: Rig,
    what: str,
    topologies: Mapping[str, Topology],
    searches: Mapping[str, Search],
    probe: Callable[[str, float, int], Cell],
    bound_ms: float,
) -> None:
    """End all searches: probe by probe in turns, each round with a seed of its own.

    Args:
        rig: where.
        what: for the progress bar.
        topologies: of the arms.
        searches: by arm; they are told what became of the probes.
        probe: sends the queries of an arm, at a rate, with a seed.
        bound_ms: that the 99th percentile must keep.
    """
    turn = 0
    while open_ := [arm for arm, search in searches.items() if not search.done]:
        seed = _SEED + turn

        def visit(arm: str, _turn: int, seed: int = seed) -> Cell:
            return probe(arm, searches[arm].rate, seed)

        arms = {arm: topologies[arm] for arm in rotated(open_, turn)}
        found = rig.take_turns(what, arms, 1, visit)
        for arm in open_:
            searches[arm].tell(within(found[arm][0], bound_ms))
        turn += 1


def peak_figures(
    experiment: str,
    searches: Mapping[str, Search],
    bound_ms: float,
    bases: Sequence[str],
    goals: Mapping[str, float] | None = None,
) -> list[Figure]:
    """The peaks, and their ratios to those of ``bases``; an arm that never kept the bound, or did
    so only once, has a note.

    Args:
        experiment: a label of all.
        searches: by arm.
        bound_ms: another.
        bases: arms that the others are laid beside.
        goals: by arm, the least that its ratios should be.
    """
    labels = {"experiment": experiment, "bound_ms": bound_ms}
    peaks = {arm: s.found for arm, s in searches.items() if s.found is not None}
    out = [
        interval_figure(PEAK, arm, None, p, "1/s", {**labels, "confirmed": searches[arm].confirmed})
        for arm, p in peaks.items()
    ]
    for arm, search in searches.items():
        if arm not in peaks:
            out.append(note(experiment, f"{arm} kept the bound in none of the probes for its peak"))
        elif not search.confirmed:
            out.append(note(experiment, f"{arm} held its peak rate in one probe only"))
    for base in bases:
        low = peaks.get(base)
        for arm, peak in peaks.items():
            if low is None or arm == base:
                continue
            ratio = Interval(
                peak.value / low.value, peak.low / low.high, peak.high / low.low, peak.n
            )
            goal = (goals or {}).get(arm)
            out.append(ratio_figure(PEAK_RATIO, arm, base, ratio, labels, goal=goal, at_least=True))
    return out
