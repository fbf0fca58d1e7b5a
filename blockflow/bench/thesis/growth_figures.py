"""Memory by arrival rate (thesis, figure 4.13): figures, table, the verdict, picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import Grid, bounds, digits
from blockflow.bench.pipeline_figures import TENSORMQ
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import (
    MIN_PAIRS,
    Interval,
    judge,
    median_interval,
    noise_of,
    ratio_interval,
)
from blockflow.bench.thesis.bars import WAY_COLOURS, draw_line
from blockflow.bench.thesis.beside import known, thesis

PSS, RSS, ARENA, GPU = "memory (PSS)", "memory (RSS)", "arenas in use", "GPU memory"
PAST_RATIO = "memory past saturation, to that below"
FIRST = "memory added by the first overload"
LONG = "growth over a long overload"
GOAL = 1.05
"""Memory is flat if it is at most so many times of what it is below saturation."""

_SOURCE = "figure 4.13"
_GREW = "there it grew; values in a picture only"
_SATURATED = 1.0
_THIRDS = 3


@dataclass(frozen=True, slots=True)
class Look:
    """MiB of all processes of a way and of the Dispatcher.

    Attributes:
        rss: resident; what processes share counts once for each.
        pss: proportional: what they share counts once.
        arena: of tensors that are on their way or in a queue.
        gpu: of the device; None without one.
    """

    rss: float
    pss: float
    arena: float
    gpu: float | None = None

    @property
    def main(self) -> float:
        """What the verdict is about: the device's memory where there is one, else PSS."""
        return self.pss if self.gpu is None else self.gpu


def settled(looks: Sequence[tuple[float, Look]]) -> Look:
    """Medians over the second half of a visit.

    Raises:
        ValueError: there are no looks.
    """
    half = [look for _, look in looks[len(looks) // 2 :]]
    gpu = [look.gpu for look in half if look.gpu is not None]
    return Look(
        median([look.rss for look in half]),
        median([look.pss for look in half]),
        median([look.arena for look in half]),
        median(gpu) if gpu else None,
    )


def growth_mib(looks: Sequence[tuple[float, Look]]) -> float:
    """The median of the last third less that of the first third.

    Raises:
        ValueError: fewer than three looks.
    """
    third = len(looks) // _THIRDS
    first, last = looks[:third], looks[-third:] if third else []
    return median([look.main for _, look in last]) - median([look.main for _, look in first])


@dataclass(slots=True)
class Way:
    """One way.

    Attributes:
        fresh: after its first requests. after: when the first overload was over.
        visits: multiple of the callers' rate -> a look per round; the n-th of all multiples and
            ways are of the same round.
        long: looks over a long overload, by seconds.
    """

    fresh: Look
    after: Look
    visits: dict[float, list[Look]] = field(default_factory=dict)
    long: Sequence[tuple[float, Look]] = ()

    @property
    def once(self) -> float:
        """MiB that the first overload has added: slots that were never used before."""
        return self.after.main - self.fresh.main

    @property
    def below(self) -> list[float]:
        return [m for m in sorted(self.visits) if m < _SATURATED]

    @property
    def past(self) -> list[float]:
        return [m for m in sorted(self.visits) if m > _SATURATED]

    @property
    def noise(self) -> float:
        """How far memory at the rates below saturation was apart: none of them fills a queue."""
        base, *others = self.below
        return max((noise_of(self._ratio([m], base)) for m in others), default=0.0)

    @property
    def ratio(self) -> Interval:
        """The most memory past saturation to that at the lowest rate, by rounds.

        A round is one sample, however many rates it has: they share the base.
        """
        return self._ratio(self.past, self.below[0])

    def _ratio(self, multiples: Sequence[float], base: float) -> Interval:
        rounds = zip(*(self.visits[m] for m in multiples), strict=True)
        most = [max(look.main for look in looks) for looks in rounds]
        return ratio_interval([look.main for look in self.visits[base]], most)

    @property
    def verdict(self) -> str:
        """Met, missed, or within noise: whether memory stays below :data:`GOAL`."""
        if self.ratio.n < MIN_PAIRS:
            return "too few rounds to conclude"
        return str(judge(self.ratio, GOAL, self.noise))


class Growth:
    """What was found.

    Args:
        ways: by name.
        callers: requests per second that the rates are multiples of.
    """

    def __init__(self, ways: Mapping[str, Way], callers: float, labels: Mapping[str, Any]) -> None:
        self._ways = ways
        self._callers = callers
        self._labels = labels

    def figures(self) -> list[Figure]:
        """Per way and rate, then the verdicts."""
        out: list[Figure] = []
        for name, way in self._ways.items():
            for multiple, looks in sorted(way.visits.items()):
                labels = {**self._labels, "times_callers": multiple}
                labels["lambda"] = round(multiple * self._callers, 4)
                numbers = [
                    (PSS, [look.pss for look in looks]),
                    (RSS, [look.rss for look in looks]),
                    (ARENA, [look.arena for look in looks]),
                    (GPU, [look.gpu for look in looks if look.gpu is not None]),
                ]
                for what, values in numbers:
                    if values:
                        out.append(interval_figure(what, name, 1, values, "MiB", labels))
        return [*out, *self.summary()]

    def summary(self) -> list[Figure]:
        """The verdict per way, and what was added once."""
        out = []
        for name, way in self._ways.items():
            labels = {**self._labels, "noise": way.noise, "goal": GOAL, "verdict": way.verdict}
            figure = interval_figure(PAST_RATIO, name, 1, way.ratio, "x", labels)
            out.append(thesis(figure, None, _SOURCE, _GREW if name == TENSORMQ else ""))
            out.append(Figure.of(FIRST, name, way.once, "MiB", 1, self._labels, batch=1))
            if len(way.long) >= _THIRDS:
                grown = growth_mib(way.long)
                labels = {**self._labels, "seconds": round(way.long[-1][0], 1)}
                out.append(Figure.of(LONG, name, grown, "MiB", 1, labels, batch=1))
        return out

    def grid(self) -> Grid:
        """A row per rate."""
        heads = ["x callers", "lambda 1/s"]
        for name in self._ways:
            heads += [f"{name} PSS", "(95%)", "RSS", "arenas"]
        rows = []
        for multiple in sorted(next(iter(self._ways.values())).visits):
            cells = [f"{multiple:g}", digits(multiple * self._callers)]
            for way in self._ways.values():
                looks = way.visits[multiple]
                pss = median_interval([look.pss for look in looks])
                cells += [digits(pss.value), bounds(pss.low, pss.high)]
                cells += [digits(median([look.rss for look in looks]))]
                cells += [digits(median([look.arena for look in looks]))]
            rows.append(tuple(cells))
        return Grid("Memory by arrival rate, MiB", tuple(heads), rows)

    def says(self) -> str:
        """One line."""
        parts = [
            f"{digits(way.ratio.value)} times with {name} (95% "
            f"{bounds(way.ratio.low, way.ratio.high)}, n = {way.ratio.n}, noise {way.noise:.1%}; "
            f"at most {GOAL:g}: {way.verdict})"
            for name, way in self._ways.items()
        ]
        first = ", ".join(
            f"{digits(way.once)} MiB with {name} ({way.once / way.fresh.main:+.0%})"
            for name, way in self._ways.items()
        )
        theirs = "; the thesis's grew" if known(self._labels) else ""
        return (
            f"memory past saturation to that below: {', '.join(parts)}; before, the first overload "
            f"of all had added once {first}{theirs}"
        )

    def draw(self) -> Any:
        """Left: memory by rate. Right: over a long overload."""
        page = new_page(10, 3.8)
        left, right = page.subplots(1, 2)
        for name, way in self._ways.items():
            colour = WAY_COLOURS[name]
            multiples = sorted(way.visits)
            xs = [m * self._callers for m in multiples]
            found = [median_interval([look.main for look in way.visits[m]]) for m in multiples]
            draw_line(left, xs, found, color=colour, label=name, ms=4, capsize=3)
            arena = [median([look.arena for look in way.visits[m]]) for m in multiples]
            left.plot(xs, arena, "o:", color=colour, ms=3, label=f"{name}, arenas in use")
            if way.long:
                times = [at for at, _ in way.long]
                right.plot(times, [look.main for _, look in way.long], color=colour, label=name)
        left.axvline(self._callers, color="black", linestyle=":", linewidth=1)
        left.set(xlabel="arrivals per second (dotted: saturation)", ylabel="MiB")
        right.set(xlabel="seconds of an overload", ylabel="MiB")
        left.legend(fontsize=8, frameon=False)
        for ax in (left, right):
            ax.set_ylim(bottom=0)
        return page

    def rows(self) -> list[tuple[Any, ...]]:
        """All visits and the long overload, for a file."""
        out: list[tuple[Any, ...]] = []
        for name, way in self._ways.items():
            for multiple, looks in sorted(way.visits.items()):
                out += [("visit", name, multiple, n, *_cells(v)) for n, v in enumerate(looks)]
            out += [("long", name, "", round(at, 2), *_cells(look)) for at, look in way.long]
        return out


def _cells(look: Look) -> tuple[Any, ...]:
    gpu = "" if look.gpu is None else round(look.gpu, 3)
    return round(look.rss, 3), round(look.pss, 3), round(look.arena, 3), gpu
