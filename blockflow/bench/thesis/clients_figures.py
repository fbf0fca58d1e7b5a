"""Latency and throughput by number of clients (thesis, figure 4.11): figures, picture. Pure.

N clients that ask in turn are a closed system: with R(1) the time of a lone request and X the most
that the pipeline can do, no law lets latency stay flat beyond N* = R(1) X clients, from where it
grows by 1/X per client (asymptotic bounds: Denning and Buzen, "The Operational Analysis of Queueing
Network Models", ACM Computing Surveys 10(3), 1978). That is the thesis's plateau and its line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import Grid, bounds, digits
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import LESS_IS_BETTER, Figure, interval_figure
from blockflow.bench.statistics import MIN_PAIRS, Interval, median_interval, slope
from blockflow.bench.thesis.bars import WAY_COLOURS, draw_line
from blockflow.bench.thesis.beside import AGAIN, Rounds, known, quoted, thesis
from blockflow.bench.thesis.rates_figures import REFUSED
from blockflow.bench.thesis.rates_model import refusals

LATENCY = "round trip"
RATE = "throughput"
RATIO = "round trip, to tensormq"
KNEE = "clients at the knee"
STEP = "further round trip per client"

THESIS_MS: Mapping[tuple[str, int], float] = {
    **{(TENSORMQ, n): 18.0 for n in range(1, 5)},
    (ZEROMQ, 1): 45.0,
    (ZEROMQ, 4): 35.0,
}
"""(Way, clients) -> milliseconds, as far as the text says them; the rest is a picture."""

_SOURCE = "figure 4.11"
_THESIS_KNEE = 4.0


@dataclass(frozen=True, slots=True)
class Visit:
    """Some clients asked in turn for a while: the median round trip, answers per second, and the
    share of the requests that were refused, which are in neither."""

    latency_ms: float
    rate: float
    refused: float = 0.0


def find_knee(alone_ms: Sequence[float], rate: Sequence[float]) -> Interval:
    """Where a way's latency begins to grow: N* = R(1) X clients.

    Args:
        alone_ms: of a lone client, one per round: R(1).
        rate: the most answers per second of the same rounds: X.
    """
    # Noise can make a lone client seem to do more than the pipeline can.
    rounds = zip(alone_ms, rate, strict=True)
    return median_interval([max(1.0, ms / 1e3 * most) for ms, most in rounds])


def find_step(latency_ms: Mapping[int, Sequence[float]], knee: float) -> Interval | None:
    """Milliseconds that a further client adds to the round trip beyond the knee.

    Args:
        latency_ms: by number of clients, a sample per round: the slope of each is a sample.
        knee: clients.

    Returns:
        None where fewer than two numbers of clients lie beyond.
    """
    beyond = [n for n in sorted(latency_ms) if n > knee]
    if len(beyond) < 2:
        return None
    rounds = zip(*(latency_ms[n] for n in beyond), strict=True)
    return median_interval([slope(beyond, times) for times in rounds])


class Clients:
    """What was found.

    Args:
        visits: (arm, clients) -> visits, one per round.
    """

    def __init__(
        self, visits: Mapping[tuple[str, int], Sequence[Visit]], labels: Mapping[str, Any]
    ) -> None:
        self._visits = visits
        self._labels = labels
        self.counts = sorted({n for _, n in visits})
        self.ways = [w for w in (TENSORMQ, ZEROMQ) if any(way == w for way, _ in visits)]

    def latency(self, clients: int) -> Rounds:
        """Median round trips by arm, a number per round."""
        return self._rounds(clients, lambda v: v.latency_ms)

    def rate(self, clients: int) -> Rounds:
        return self._rounds(clients, lambda v: v.rate)

    def _rounds(self, clients: int, value: Any) -> Rounds:
        found = {arm: f for (arm, n), f in self._visits.items() if n == clients}
        return Rounds({arm: [value(v) for v in f] for arm, f in found.items()})

    def knee(self, way: str) -> Interval:
        """N* by rounds; X is the rate with the number of clients that do the most on the whole."""
        most = max(self.counts, key=lambda n: self.rate(n).median(way).value)
        alone = [v.latency_ms for v in self._visits[way, self.counts[0]]]
        return find_knee(alone, [v.rate for v in self._visits[way, most]])

    def step(self, way: str) -> Interval | None:
        """What a further client adds beyond the knee, by rounds; none of them is left out, so that
        those of all numbers of clients are the same."""
        times = {n: [v.latency_ms for v in self._visits[way, n]] for n in self.counts}
        return find_step(times, self.knee(way).value)

    def _printed(self, way: str, clients: int) -> float | None:
        """The thesis's round trip, where it tells one."""
        return THESIS_MS.get((way, clients)) if known(self._labels) else None

    def _printed_ratio(self, clients: int) -> float | None:
        """Whole tensors to handles, where both are told."""
        ours, theirs = self._printed(TENSORMQ, clients), self._printed(ZEROMQ, clients)
        return None if ours is None or theirs is None else round(theirs / ours, 2)

    @property
    def noise(self) -> float:
        """The most that equal visits were apart, over all numbers of clients."""
        return max(self.latency(n).noise for n in self.counts)

    def figures(self) -> list[Figure]:
        """Per number of clients and arm; then how the ways compare, and the knees."""
        out: list[Figure] = []
        for n in self.counts:
            labels = {**self._labels, "clients": n}
            latency, rate = self.latency(n), self.rate(n)
            for arm in latency.samples:
                figure = interval_figure(LATENCY, arm, 1, latency.median(arm), "ms", labels)
                out.append(thesis(figure, THESIS_MS.get((arm, n)), _SOURCE))
                out.append(interval_figure(RATE, arm, 1, rate.median(arm), "1/s", labels))
                refused = [v.refused for v in self._visits[arm, n]]
                less = labels | LESS_IS_BETTER
                out.append(interval_figure(REFUSED, arm, 1, refused, "x", less))
            if len(self.ways) > 1:
                ratio = latency.ratio(TENSORMQ, ZEROMQ)
                noise = {**labels, "noise": latency.noise}
                figure = interval_figure(RATIO, ZEROMQ, 1, ratio, "x", noise)
                out.append(thesis(figure, self._printed_ratio(n), _SOURCE))
        for way in self.ways:
            figure = interval_figure(KNEE, way, 1, self.knee(way), "1", self._labels)
            out.append(thesis(figure, _THESIS_KNEE if way == TENSORMQ else None, _SOURCE))
            step = self.step(way)
            if step is not None:
                figure = interval_figure(STEP, way, 1, step, "ms", self._labels)
                out.append(thesis(figure, None, _SOURCE))
        return out

    def refusals(self) -> list[str]:
        """A note for each arm and number of clients of whose requests some were refused."""
        return refusals(
            (f"of {n} clients by {arm}", [v.refused for v in found])
            for (arm, n), found in self._visits.items()
        )

    def grid(self) -> Grid:
        """A row per number of clients."""
        heads = ["clients"]
        for way in self.ways:
            heads += [f"{way} ms", "(95%)", "1/s", "thesis ms"]
        rows = []
        for n in self.counts:
            latency, rate = self.latency(n), self.rate(n)
            cells = [str(n)]
            for way in self.ways:
                found, printed = latency.median(way), self._printed(way, n)
                cells += [digits(found.value), bounds(found.low, found.high)]
                cells += [digits(rate.median(way).value)]
                cells += ["" if printed is None else digits(printed)]
            if len(self.ways) > 1:
                ratio, printed = latency.ratio(TENSORMQ, ZEROMQ), self._printed_ratio(n)
                cells += [digits(ratio.value), bounds(ratio.low, ratio.high)]
                cells += ["" if printed is None else digits(printed)]
            rows.append(tuple(cells))
        if len(self.ways) > 1:
            heads += [f"{ZEROMQ} x", "(95%)", "thesis x"]
        return Grid("Round trip and throughput by number of clients", tuple(heads), rows)

    def says(self) -> str:
        """One line."""
        most = self.counts[-1]
        knee, step = self.knee(TENSORMQ), self.step(TENSORMQ)
        line = (
            f"with handles a lone request's time and the highest rate put the end of the plateau "
            f"at {knee.value:.1f} clients ({_shown(knee)})"
            f"{quoted(self._labels, f'{_THESIS_KNEE:g}')}"
        )
        if step is not None:
            line += f", from where each further one adds {digits(step.value)} ms ({_shown(step)})"
        if len(self.ways) < 2:
            return line
        told = self.latency(most).compared(TENSORMQ, ZEROMQ)
        return f"{line}; with {most} clients whole tensors are {told}"

    def draw(self) -> Any:
        """Left: round trip by clients, with the bounds' knee. Right: throughput."""
        page = new_page(10, 3.8)
        left, right = page.subplots(1, 2)
        for way in self.ways:
            colour = WAY_COLOURS[way]
            for ax, rounds in ((left, self.latency), (right, self.rate)):
                found = [rounds(n).median(way) for n in self.counts]
                draw_line(ax, self.counts, found, color=colour, label=way, ms=3, capsize=2)
            left.axvline(self.knee(way).value, color=colour, linestyle=":", linewidth=1)
            marks = {n: v for n in self.counts if (v := self._printed(way, n)) is not None}
            if marks:
                xs, ys = list(marks), list(marks.values())
                left.plot(xs, ys, "_", color=colour, ms=9, label=f"{way}, the thesis's")
        left.set(xlabel="clients", ylabel="round trip, ms (dotted: knee)")
        right.set(xlabel="clients", ylabel="answers per second")
        left.legend(fontsize=8, frameon=False)
        for ax in (left, right):
            ax.set_ylim(bottom=0)
        return page

    def rows(self) -> list[tuple[Any, ...]]:
        """All visits, for a file."""
        return [
            (way, n, number, round(v.latency_ms, 4), round(v.rate, 4), round(v.refused, 4))
            for (way, n), found in self._visits.items()
            for number, v in enumerate(found)
            if not way.endswith(AGAIN)
        ]


def _shown(found: Interval) -> str:
    """An interval in words, and whether it says anything."""
    few = ": too few rounds to conclude" if found.n < MIN_PAIRS else ""
    return f"95% {bounds(found.low, found.high)}, n = {found.n}{few}"
