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
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import Interval, slope
from blockflow.bench.thesis.beside import AGAIN, Rounds, thesis

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
_COLOURS = {TENSORMQ: "#17779b", ZEROMQ: "#5a4a78"}


def _thesis_ratio(clients: int) -> float | None:
    """Whole tensors to handles, where both are told."""
    ours, theirs = THESIS_MS.get((TENSORMQ, clients)), THESIS_MS.get((ZEROMQ, clients))
    return None if ours is None or theirs is None else round(theirs / ours, 2)


@dataclass(frozen=True, slots=True)
class Visit:
    """Some clients asked in turn for a while: the median round trip, and answers per second."""

    latency_ms: float
    rate: float


@dataclass(frozen=True, slots=True)
class Knee:
    """Where a way's latency begins to grow.

    Attributes:
        clients: N* = R(1) X, at least 1.
        step_ms: what a further client adds to the round trip beyond it; None where too few numbers
            of clients lie beyond.
    """

    clients: float
    step_ms: float | None


def find_knee(latency_ms: Mapping[int, float], rate: Mapping[int, float]) -> Knee:
    """From medians by number of clients.

    Raises:
        ValueError: nothing was measured with the fewest clients.
    """
    fewest = min(latency_ms)
    # Noise can make a lone client seem to do more than the pipeline can.
    knee = max(1.0, latency_ms[fewest] / 1e3 * max(rate.values()))
    beyond = [n for n in sorted(latency_ms) if n > knee]
    step = slope(beyond, [latency_ms[n] for n in beyond]) if len(beyond) > 1 else None
    return Knee(knee, step)


class Clients:
    """What was found.

    Args:
        visits: (arm, clients) -> visits, one per round.
        labels: of every figure.
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

    def knee(self, way: str) -> Knee:
        latency = {n: self.latency(n).median(way).value for n in self.counts}
        return find_knee(latency, {n: self.rate(n).median(way).value for n in self.counts})

    def knee_interval(self, way: str) -> Interval:
        """N* with what it inherits from the interval of R(1)."""
        alone, knee = self.latency(self.counts[0]).median(way), self.knee(way).clients
        scale = knee / alone.value
        return Interval(knee, max(1.0, alone.low * scale), max(1.0, alone.high * scale), alone.n)

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
            if len(self.ways) > 1:
                labels["noise"] = latency.noise
                ratio = latency.ratio(TENSORMQ, ZEROMQ)
                figure = interval_figure(RATIO, ZEROMQ, 1, ratio, "x", labels)
                out.append(thesis(figure, _thesis_ratio(n), _SOURCE))
        for way in self.ways:
            knee = self.knee(way)
            figure = interval_figure(KNEE, way, 1, self.knee_interval(way), "1", self._labels)
            out.append(thesis(figure, _THESIS_KNEE if way == TENSORMQ else None, _SOURCE))
            if knee.step_ms is not None:
                made = Figure(STEP, way, 1, None, None, knee.step_ms, "ms", 1, labels=self._labels)
                out.append(thesis(made, None, _SOURCE))
        return out

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
                found, printed = latency.median(way), THESIS_MS.get((way, n))
                cells += [digits(found.value), bounds(found.low, found.high)]
                cells += [digits(rate.median(way).value)]
                cells += ["" if printed is None else digits(printed)]
            if len(self.ways) > 1:
                ratio, printed = latency.ratio(TENSORMQ, ZEROMQ), _thesis_ratio(n)
                cells += [digits(ratio.value), bounds(ratio.low, ratio.high)]
                cells += ["" if printed is None else digits(printed)]
            rows.append(tuple(cells))
        if len(self.ways) > 1:
            heads += [f"{ZEROMQ} x", "(95%)", "thesis x"]
        return Grid("Round trip and throughput by number of clients", tuple(heads), rows)

    def says(self) -> str:
        """One line."""
        most = self.counts[-1]
        knee, where = self.knee(TENSORMQ), self.knee_interval(TENSORMQ)
        line = (
            f"with handles a lone request's time and the highest rate put the end of the plateau "
            f"at {knee.clients:.1f} clients (95% {bounds(where.low, where.high)}; thesis: "
            f"{_THESIS_KNEE:g})"
        )
        if knee.step_ms is not None:
            line += f", from where each further one adds {digits(knee.step_ms)} ms"
        if len(self.ways) < 2:
            return line
        told = self.latency(most).compared(TENSORMQ, ZEROMQ)
        return f"{line}; with {most} clients whole tensors are {told}"

    def draw(self) -> Any:
        """Left: round trip by clients, with the bounds' knee. Right: throughput.

        Raises:
            SystemError_: MISSING_EXTRA without matplotlib.
        """
        page = new_page(10, 3.8)
        left, right = page.subplots(1, 2)
        for way in self.ways:
            colour = _COLOURS[way]
            for ax, rounds in ((left, self.latency), (right, self.rate)):
                found = [rounds(n).median(way) for n in self.counts]
                values = [f.value for f in found]
                apart = [f.value - f.low for f in found], [f.high - f.value for f in found]
                ax.errorbar(
                    self.counts, values, apart, fmt="o-", color=colour, label=way, ms=3, capsize=2
                )
            knee = self.knee(way).clients
            left.axvline(knee, color=colour, linestyle=":", linewidth=1)
            marks = [(n, v) for (w, n), v in THESIS_MS.items() if w == way and n in self.counts]
            xs, ys = [n for n, _ in marks], [v for _, v in marks]
            left.plot(xs, ys, "_", color=colour, ms=9, label=f"{way}, the thesis's")
        left.set(xlabel="clients", ylabel="round trip, ms (dotted: knee)")
        right.set(xlabel="clients", ylabel="answers per second")
        left.legend(fontsize=8, frameon=False)
        for ax in (left, right):
            ax.set_ylim(bottom=0)
            ax.spines[["top", "right"]].set_visible(False)
        return page

    def rows(self) -> list[tuple[Any, ...]]:
        """All visits, for a file."""
        return [
            (way, n, number, round(v.latency_ms, 4), round(v.rate, 4))
            for (way, n), found in self._visits.items()
            for number, v in enumerate(found)
            if not way.endswith(AGAIN)
        ]
