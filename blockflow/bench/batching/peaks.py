"""Peaks: the highest rate that an arm answers within a latency bound, between two rates that were
probed twice: one that held and one that did not.

A probe at a rate holds if all its queries are answered, the 99th percentile keeps the bound, over
all of it and over its later half, and the number under way does not grow. It is long beside the
bound (``probe_bounds`` of the plan): in a short one a queue can grow all the time and still be
within it at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blockflow.bench.batching.figures import PEAK, PEAK_RATIO, note, ratio_figure
from blockflow.bench.batching.rig import Rig, Topology
from blockflow.bench.batching.traffic import Cell
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import Interval, percentile
from blockflow.bench.turns import rotated

GROWTH_LIMIT = 0.05
"""By no more of what comes may the number under way grow. In simulated probes of twenty bounds none
grew by more that came at less than the capacity; at 1.06 times the capacity one in twelve held."""
FACTOR = 1.3
CONFIRMING = 8
"""Probes at most that a search may add to those that were planned, to confirm its bracket."""
NARROW = 1.05
"""A bracket whose ends lie no farther apart is not halved any more: near its edge a probe holds by
chance."""
_TWICE = 2
_AFTER = 2
"""Probes that a search gets anew when a rate has turned out otherwise than it seemed at first."""
_FROM_BELOW = 4
"""Probes that it may add when no rate is left that holds: below, between, and both again."""
_SEED = 100


def within(cell: Cell, bound_ms: float) -> bool:
    """Whether a probe held."""
    if cell.failed or not cell.times_ms or not cell.later_ms:
        return False
    late = max(percentile(cell.times_ms, 99), percentile(cell.later_ms, 99))
    return late <= bound_ms and cell.growth <= GROWTH_LIMIT


class Search:
    """The highest rate that holds: steps by a factor until it is bracketed, then halves, and at
    last probes both ends of the bracket again.

    Where the two probes of a rate disagree, a third one decides: a moment in which something else
    was busy must neither make a peak nor cap it. A rate above one that has failed counts no more,
    however often it held.

    Args:
        start: the first rate to try.
        probes: before the bracket is confirmed.
        confirming: further ones at most.
    """

    def __init__(self, start: float, probes: int, confirming: int = CONFIRMING) -> None:
        self._start = start
        self._bracketing = probes
        self._most = probes + confirming
        self._told: dict[float, list[bool]] = {}
        self.made = 0

    @property
    def fails(self) -> float | None:
        """The lowest rate that failed more often than it held."""
        return min((r for r in self._told if self._majority(r) < 0), default=None)

    @property
    def holds(self) -> float | None:
        """The highest rate that held more often than it failed, below all that failed."""
        fails = self.fails
        below = [r for r in self._told if self._majority(r) > 0 and (fails is None or r < fails)]
        return max(below, default=None)

    @property
    def confirmed(self) -> bool:
        """Whether both ends of the bracket were found twice, and nothing within it is open."""
        ends = self.holds, self.fails
        return self._torn is None and not any(e is None or self._once(e) for e in ends)

    @property
    def done(self) -> bool:
        low, high = self.holds, self.fails
        narrow = low is not None and high is not None and high < NARROW * low
        enough = (narrow or self.made >= self._bracketing) and self.confirmed
        return enough or self.made >= self._most

    @property
    def rate(self) -> float:
        """What to try next."""
        low, high, torn = self.holds, self.fails, self._torn
        if torn is not None:
            return torn
        if low is None:
            return self._start if high is None else high / FACTOR
        if high is None:
            return low * FACTOR
        if self.made >= self._bracketing or high < NARROW * low:
            for end in (low, high):
                if self._once(end):
                    return end
        return float((low * high) ** 0.5)

    def tell(self, held: bool) -> None:
        """What became of :attr:`rate`."""
        rate = self.rate
        told = self._told.setdefault(rate, [])
        told.append(held)
        self.made += 1
        if len(told) > _TWICE and held != told[0]:
            self._bracketing = max(self._bracketing, self.made + _AFTER)
            if self.holds is None:
                self._most = max(self._most, self.made + _FROM_BELOW)

    @property
    def found(self) -> Interval | None:
        """The highest rate that held, up to the lowest that did not, and from how many probes;
        None: none held."""
        low = self.holds
        if low is None:
            return None
        return Interval(low, low, self.fails or low * FACTOR, self.made)

    def beside(self, base: Interval) -> Interval:
        """The peak as a multiple of ``base``. One that was never found lies between nothing and
        what failed."""
        found = self.found or Interval(0.0, 0.0, self.fails or 0.0, self.made)
        return Interval(
            found.value / base.value, found.low / base.high, found.high / base.low, found.n
        )

    @property
    def sure(self) -> bool:
        """Whether something may be concluded: the bracket is confirmed, or none of all the probes
        held."""
        return self.confirmed or (self.done and not self.held)

    @property
    def held(self) -> bool:
        """Whether any probe has, even if others at its rate have not."""
        return any(map(any, self._told.values()))

    @property
    def _torn(self) -> float | None:
        """A rate within the bracket that has held as often as it has failed."""
        low, high = self.holds, self.fails
        return next(
            (
                r
                for r in self._told
                if self._majority(r) == 0
                and (low is None or r > low)
                and (high is None or r < high)
            ),
            None,
        )

    def _majority(self, rate: float) -> int:
        """Above 0: it held more often than it failed."""
        told = self._told[rate]
        return 2 * sum(told) - len(told)

    def _once(self, rate: float) -> bool:
        """Whether it has been probed only once."""
        return len(self._told[rate]) < _TWICE


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
    """The peaks, and their ratios to those of ``bases``; an arm that never kept the bound, or whose
    bracket is not confirmed, has a note. Who has an aim and no peak has missed it.

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
        if arm not in peaks and not search.held:
            out.append(note(experiment, f"{arm} kept the bound in none of the probes for its peak"))
        elif arm not in peaks:
            text = f"{arm} kept the bound at no rate more often than not"
            out.append(note(experiment, f"{text}: nothing is concluded from its probes"))
        elif not search.confirmed:
            text = f"{arm}'s peak lies in a bracket whose ends were not both found in two probes"
            out.append(note(experiment, f"{text}: nothing is concluded from it"))
    for base in bases:
        low = peaks.get(base)
        for arm, search in searches.items():
            goal = (goals or {}).get(arm)
            if low is None or arm == base or (arm not in peaks and goal is None):
                continue
            out.append(
                ratio_figure(
                    PEAK_RATIO,
                    arm,
                    base,
                    search.beside(low),
                    labels,
                    goal=goal,
                    at_least=True,
                    sure=search.sure and searches[base].sure,
                )
            )
    return out
