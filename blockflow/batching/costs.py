"""Costs: predicted times of batches on the stages of a worker, from their profiles.

Nanoseconds by rows, as plain lists: a policy looks at dozens of candidates within microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from itertools import accumulate

from blockflow.batching.facts import StageFacts
from blockflow.core.fit import CurveFit, fit_curve
from blockflow.core.profile import interpolate

Route = tuple[int, ...]
"""Stages that a batch runs one after the other."""

Line = list[int]
"""``line[b]``: nanoseconds of a batch of b rows; ``line[0]`` is 0."""

_NS = 1_000_000
_KEPT = 4096
_KEPT_TIMES = 1 << 19
"""Of all remembered lines together, some 40 bytes each: what 4096 lines of 128 rows have. By their
number alone a policy of variable lengths and 256 rows a batch would keep 150 MB of them."""
_LONGEST = 1024
"""Lines are this long at most; beyond it times grow in proportion."""
_WORST_FIT = 0.25
"""A curve that misses a measured point by more than this is not used."""


def at(line: Sequence[int], rows: int) -> int:
    """``line`` at ``rows``; beyond its end in proportion."""
    if rows < len(line):
        return line[rows]
    return line[-1] * rows // (len(line) - 1)


class Costs:
    """Times by stage, rows and length.

    Args:
        facts: of the stages. Without a profile of each of them nothing is known.
        top: rows of the largest batch that will be asked for.
    """

    def __init__(self, facts: Mapping[int, StageFacts], top: int) -> None:
        self._facts = dict(facts)
        self.known = bool(facts) and all(measured(f) for f in facts.values())
        self._top = min(top, _LONGEST)
        self._lines: dict[tuple[Route, int | None], Line] = {}
        self._parts: dict[tuple[Route, int | None], list[Line]] = {}
        self._bounds: dict[tuple[Route, int | None], tuple[Line, dict[int, Line]]] = {}
        self._times = 0  # in what is remembered
        self._spreads = {
            stage: f.profile.r_max(f.threads) if f.profile and measured(f) else 0.0
            for stage, f in self._facts.items()
        }

    def line(self, route: Route, length: int | None = None) -> Line:
        """Times of a batch through all stages of ``route``, by the measured tables.

        ``length`` is of what the first of them takes.
        """
        key = (route, length)
        line = self._lines.get(key)
        if line is None:
            if len(route) == 1:
                line = self._stage(route[0], length)
            else:
                parts = self.parts(route, length)
                line = [sum(times) for times in zip(*parts, strict=True)] or [0] * (self._top + 1)
            self._make_room(self._lines, len(line))
            self._lines[key] = line
        return line

    def parts(self, route: Route, length: int | None = None) -> list[Line]:
        """:meth:`line` of each stage of ``route`` for what comes to it."""
        key = (route, length)
        parts = self._parts.get(key)
        if parts is None:
            parts = []
            for stage in route:
                parts.append(self.line((stage,), length))
                length = self._facts[stage].carried(length)
            self._make_room(self._parts, sum(map(len, parts)))
            self._parts[key] = parts
        return parts

    def bound(self, route: Route, length: int | None, rows: int) -> int:
        """What no batch takes longer than that has up to ``rows`` rows at each stage of ``route``,
        or leaves it out, and of which nobody is longer than ``length`` where it begins."""
        return at(self._bound_lines(route, length)[0], rows)

    def bounds(self, route: Route, length: int | None) -> Mapping[int, Line]:
        """:meth:`bound` at each stage of ``route``, by rows."""
        return self._bound_lines(route, length)[1]

    def _bound_lines(self, route: Route, length: int | None) -> tuple[Line, dict[int, Line]]:
        key = (route, length)
        found = self._bounds.get(key)
        if found is None:
            bounds, longest = dict[int, Line](), length
            for stage in route:
                # Measured times may fall somewhere; a bound does not.
                bounds[stage] = list(accumulate(self.line((stage,), longest), max))
                if longest is not None:
                    longest = max(longest, self._facts[stage].carried(longest) or 0)
            whole = [sum(times) for times in zip(*bounds.values(), strict=True)]
            self._make_room(self._bounds, len(whole) * (1 + len(bounds)))
            found = self._bounds[key] = whole, bounds
        return found

    def _make_room(self, kept: Sized, times: int) -> None:
        """Before something of so many times joins what is ``kept``. All is forgotten at once, for
        parts and bounds hold on to lines."""
        if len(kept) >= _KEPT or self._times + times > _KEPT_TIMES:
            self._lines.clear()
            self._parts.clear()
            self._bounds.clear()
            self._times = 0
        self._times += times

    def fluctuation(self, route: Iterable[int]) -> float:
        """LBCI's ``r_max``: the largest over the route's stages."""
        return max([self._spreads[stage] for stage in route], default=0.0)

    def _stage(self, stage: int, length: int | None) -> Line:
        points = self._points(stage, length)
        if not points:
            return [0] * (self._top + 1)
        return [0, *(round(interpolate(points, b) * _NS) for b in range(1, self._top + 1))]

    def _points(self, stage: int, length: int | None) -> list[tuple[int, float]]:
        """(rows, ms) as measured; nothing without a profile."""
        f = self._facts[stage]
        if f.profile is None:
            return []
        rows = f.profile.rows_measured(f.threads)
        return [(b, f.profile.ms(b, f.threads, length)) for b in rows]


class FittedCosts(Costs):
    """Times by LBCI's four-parameter curve, fitted to each stage once: ``g`` of a route is the sum
    of its stages' curves. (LBCI, section 3.2 and equation 6)

    The table itself counts where a curve misses a point by more than a quarter, and for stages
    of a variable length: a fit takes milliseconds, and there would be one for each length.
    """

    def __init__(self, facts: Mapping[int, StageFacts], top: int) -> None:
        super().__init__(facts, top)
        self._curves: dict[int, Line] = {}
        for stage, f in self._facts.items():
            points = [] if f.length_dims else self._points(stage, None)
            if points:
                curve = _curve(tuple(points))
                if curve.max_error <= _WORST_FIT:
                    most = max(b for b, _ in points)
                    times = [curve.total(b) for b in range(1, self._top + 1)]
                    # Beyond what was measured a curve may flatten, or fall: no batch is cheaper
                    # there than the table's last slope says.
                    times[most:] = [
                        max(t, interpolate(points, b)) for b, t in enumerate(times[most:], most + 1)
                    ]
                    self._curves[stage] = [0, *(round(t * _NS) for t in times)]

    def _stage(self, stage: int, length: int | None) -> Line:
        curve = self._curves.get(stage)
        return super()._stage(stage, length) if curve is None else curve


@lru_cache(maxsize=256)
def _curve(points: tuple[tuple[int, float], ...]) -> CurveFit:
    """The curve through (rows, ms). A policy is checked and then made, and made again when shares
    or threads change: a fit takes milliseconds, and no request should wait for it twice."""
    return fit_curve([b for b, _ in points], [ms for _, ms in points])


def measured(facts: StageFacts) -> bool:
    """Whether there is a profile for the threads that the stage runs with."""
    return facts.profile is not None and facts.threads in facts.profile.threads_measured()
