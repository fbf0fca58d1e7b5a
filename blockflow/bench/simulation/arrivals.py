"""Arrivals: when which query comes, with how many rows and which length.

Open arrivals do not care how the system fares: Poisson, bursts, a step, a recorded trace. A closed
loop keeps a number of clients busy: each sends its next query when its last one has left.

As text: ``poisson``, ``burst:factor=4,on_s=1,off_s=5``, ``step:factor=3,at=0.5``, ``closed:8``, or
the name of a trace's file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import NamedTuple

from blockflow.bench.options import nonsense
from blockflow.bench.simulation.sizes import Sizes
from blockflow.bench.simulation.text import Options, whole
from blockflow.bench.simulation.trace import Entry, read_trace

_NS = 1_000_000_000
MAX_CLIENTS = 100_000


class Arrival(NamedTuple):
    """One query: when it comes, for which task, with how many rows, of which length."""

    at_ns: int
    task: str
    rows: int
    length: int | None


@dataclass(frozen=True, slots=True)
class Mix:
    """What queries are like.

    Attributes:
        tasks: with their shares.
        rows: per query.
        lengths: per query; None where blocks have no variable dim.
    """

    tasks: Sequence[tuple[str, float]]
    rows: Sizes
    lengths: Sizes | None = None

    def drawer(self, rng: Random) -> Callable[[int], Arrival]:
        """A function from a time to a query that comes then."""
        names = [name for name, _ in self.tasks]
        marks = list(accumulate(share for _, share in self.tasks))
        rows, lengths, last = self.rows, self.lengths, len(names) - 1

        def draw(at_ns: int) -> Arrival:
            task = names[min(last, bisect_left(marks, rng.random() * marks[-1]))]
            length = None if lengths is None else lengths.draw(rng)
            return Arrival(at_ns, task, rows.draw(rng), length)

        return draw


class Arrivals(ABC):
    """A way that queries come."""

    clients = 0
    """> 0: a closed loop of so many clients; then :meth:`times` is each one's first query."""

    @abstractmethod
    def times(self, rate: float, duration_s: float, rng: Random) -> Iterator[int]:
        """Times in nanoseconds, ascending, from 0 to ``duration_s``; ``rate`` is queries per
        second."""

    def work(self, rate: float, duration_s: float) -> float:
        """About how many steps it takes to draw the times, at least one per query."""
        return rate * duration_s

    def queries(self, rate: float, duration_s: float, mix: Mix, seed: str) -> Iterator[Arrival]:
        """The queries; equal seeds give equal ones, whatever becomes of them."""
        draw = mix.drawer(Random(f"{seed}/queries"))
        return map(draw, self.times(rate, duration_s, Random(f"{seed}/times")))


@dataclass(frozen=True, slots=True)
class Poisson(Arrivals):
    """Independent queries: exponential gaps."""

    def times(self, rate: float, duration_s: float, rng: Random) -> Iterator[int]:
        return _poisson(0.0, duration_s, rate, rng)


@dataclass(frozen=True, slots=True)
class Bursts(Arrivals):
    """A Poisson process that switches between two rates (an MMPP of two states).

    Attributes:
        factor: rate in a burst relative to the mean rate.
        on_s: mean length of a burst; exponential, as the time between bursts.
        off_s: mean time between bursts. What is left of the mean rate comes then.
    """

    factor: float
    on_s: float
    off_s: float

    def work(self, rate: float, duration_s: float) -> float:
        return (rate + 2 / (self.on_s + self.off_s)) * duration_s

    def times(self, rate: float, duration_s: float, rng: Random) -> Iterator[int]:
        share = self.on_s / (self.on_s + self.off_s)
        quiet = max(0.0, 1.0 - self.factor * share) / (1.0 - share)
        at, on = 0.0, rng.random() < share
        while at < duration_s:
            end = at + rng.expovariate(1.0 / (self.on_s if on else self.off_s))
            yield from _poisson(
                at, min(end, duration_s), rate * (self.factor if on else quiet), rng
            )
            at, on = end, not on


@dataclass(frozen=True, slots=True)
class Step(Arrivals):
    """Poisson at ``rate``, and at ``factor`` times that from the share ``at`` of the duration."""

    factor: float
    at: float

    def work(self, rate: float, duration_s: float) -> float:
        return rate * duration_s * (self.at + self.factor * (1.0 - self.at))

    def times(self, rate: float, duration_s: float, rng: Random) -> Iterator[int]:
        turn = self.at * duration_s
        yield from _poisson(0.0, turn, rate, rng)
        yield from _poisson(turn, duration_s, rate * self.factor, rng)


@dataclass(frozen=True, slots=True)
class Closed(Arrivals):
    """``clients`` that send their next query when the last one has left; they begin together."""

    clients: int

    def times(self, rate: float, duration_s: float, rng: Random) -> Iterator[int]:
        return iter([0] * self.clients)


@dataclass(frozen=True, slots=True)
class Recorded(Arrivals):
    """A trace, as it was recorded: rates and distributions do not matter to it.

    Its queries carry their own task, rows and length; what it does not say is drawn.
    """

    entries: tuple[Entry, ...]

    def work(self, rate: float, duration_s: float) -> float:
        return float(sum(1 for _ in self._within(duration_s)))

    def times(self, rate: float, duration_s: float, rng: Random) -> Iterator[int]:
        return (at for at, _, _, _ in self._within(duration_s))

    def queries(self, rate: float, duration_s: float, mix: Mix, seed: str) -> Iterator[Arrival]:
        draw = mix.drawer(Random(f"{seed}/queries"))
        for at, task, rows, length in self._within(duration_s):
            drawn = draw(at)
            yield Arrival(
                at,
                drawn.task if task is None else task,
                drawn.rows if rows is None else rows,
                drawn.length if length is None else length,
            )

    def _within(self, duration_s: float) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry[0] < duration_s * _NS)


def parse_arrivals(text: str, where: str = "--arrivals") -> Arrivals:
    """Arrivals from their text form (see the module's docstring).

    Raises:
        RequestError: INVALID_REQUEST; also for a trace that cannot be read.
    """
    kind, _, rest = text.partition(":")
    make = _KINDS.get(kind)
    if make is not None:
        return make(rest, where)
    if Path(text).suffix in (".csv", ".jsonl") or Path(text).exists():
        return Recorded(read_trace(Path(text)))
    known = ", ".join(_KINDS)
    raise nonsense(f"unknown arrivals {text!r}", where, f"known: {known}, or a .csv or .jsonl file")


def _poisson(start: float, stop: float, rate: float, rng: Random) -> Iterator[int]:
    if rate <= 0.0:
        return
    at = start + rng.expovariate(rate)
    while at < stop:
        yield int(at * _NS)
        at += rng.expovariate(rate)


def _make_poisson(rest: str, where: str) -> Arrivals:
    Options(rest, where, known=())
    return Poisson()


def _make_bursts(rest: str, where: str) -> Arrivals:
    options = Options(rest, where, known=("factor", "on_s", "off_s"))
    bursts = Bursts(
        options.number("factor", 4.0, above=1.0),
        options.number("on_s", 1.0, above=0.0),
        options.number("off_s", 5.0, above=0.0),
    )
    most = (bursts.on_s + bursts.off_s) / bursts.on_s
    if bursts.factor > most + 1e-9:
        raise nonsense(
            f"factor={bursts.factor:g} exceeds the mean rate even if nothing comes between bursts",
            where,
            f"at most (on_s + off_s) / on_s = {most:g}",
        )
    return bursts


def _make_step(rest: str, where: str) -> Arrivals:
    options = Options(rest, where, known=("factor", "at"))
    at = options.number("at", 0.5, above=0.0)
    if at >= 1.0:
        raise nonsense(f"at={at:g} is a share of the duration: below 1", where)
    return Step(options.number("factor", 2.0, above=0.0), at)


def _make_closed(rest: str, where: str) -> Arrivals:
    return Closed(whole(rest or "1", where, 1, MAX_CLIENTS))


_KINDS: dict[str, Callable[[str, str], Arrivals]] = {
    "poisson": _make_poisson,
    "burst": _make_bursts,
    "step": _make_step,
    "closed": _make_closed,
}
