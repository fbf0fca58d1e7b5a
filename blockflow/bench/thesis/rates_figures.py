"""Throughput by arrival rate, and saturation (thesis, figure 4.12): figures and picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import Grid, bounds, digits
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import Interval, median_interval, percentile
from blockflow.bench.thesis.beside import AGAIN, Rounds, compared, thesis
from blockflow.bench.thesis.rates_model import Capacity, Flow

THROUGHPUT = "throughput"
CARRIED = "answered of what came"
REFUSED = "refused of what came"
SATURATED = "throughput past saturation"
RATIO = "throughput past saturation, to zeromq"
OF_LIMIT = "throughput past saturation, of the predicted limit"
LEAST_MU = "min mu"
LIMIT = "predicted limit"
CALLERS = "throughput of callers that wait"
KEEPS_UP = "highest rate that is kept up with"

PAST = 1.25
"""Rates from this multiple of the callers' rate on count as past saturation."""

KEPT = 0.9
"""A rate is kept up with if this share of what came is answered. In a visit's few seconds some
requests come before and are answered after the part that counts, or the other way round."""

THESIS_PEAK: Mapping[str, float] = {TENSORMQ: 217.0, ZEROMQ: 160.0}
_THESIS_RATIO = 217 / 160
# Table 4.2: the slowest scripted block takes 4.021 ms.
_THESIS_LIMIT = 1e3 / 4.021
_SOURCE = "figure 4.12"
_COLOURS = {TENSORMQ: "#17779b", ZEROMQ: "#5a4a78"}


class Sweep:
    """What was found.

    Args:
        flows: (arm, multiple of the callers' rate) -> flows, one per round.
        capacity: what is predicted.
        callers: answers per second to a few callers that wait for theirs, with handles: what the
            rates are multiples of.
        labels: of every figure.
    """

    def __init__(
        self,
        flows: Mapping[tuple[str, float], Sequence[Flow]],
        capacity: Capacity,
        callers: float,
        labels: Mapping[str, Any],
    ) -> None:
        self._flows = flows
        self._capacity = capacity
        self._callers = callers
        self._labels = labels
        self.multiples = sorted({m for _, m in flows})
        self.past = [m for m in self.multiples if m >= PAST]

    @property
    def saturated(self) -> Rounds:
        """Answers per second past saturation: the mean over the rates there is a round's sample.

        Rates are no repeats: what one round has at several of them is not independent.
        """
        found: dict[str, list[Sequence[Flow]]] = {}
        for (arm, multiple), flows in self._flows.items():
            if multiple >= PAST:
                found.setdefault(arm, []).append(flows)
        return Rounds(
            {
                arm: [fmean(f.answered for f in one) for one in zip(*rates, strict=True)]
                for arm, rates in found.items()
            }
        )

    @property
    def ratio(self) -> Interval | None:
        """Answers with handles to those with whole tensors; None where a visit had none."""
        rounds = self.saturated
        if not all(all(values) for values in rounds.samples.values()):
            return None
        return rounds.ratio(ZEROMQ, TENSORMQ)

    def keeps_up(self, way: str) -> float | None:
        """The highest rate per second below which all are kept up with; None if none is."""
        best = None
        for multiple in self.multiples:
            flows = self._flows[way, multiple]
            if sum(f.answered for f in flows) < KEPT * sum(f.offered for f in flows):
                break
            best = multiple * self._callers
        return best

    def figures(self) -> list[Figure]:
        """Per arm and rate; then saturation beside the prediction and the thesis."""
        out: list[Figure] = []
        for (arm, multiple), flows in self._flows.items():
            labels = {**self._labels, "times_callers": multiple}
            labels["lambda"] = round(multiple * self._callers, 4)
            for name, values, unit in (
                (THROUGHPUT, [f.answered for f in flows], "1/s"),
                (CARRIED, [f.carried for f in flows], "x"),
                (REFUSED, [f.refused for f in flows], "x"),
            ):
                out.append(interval_figure(name, arm, 1, median_interval(values), unit, labels))
        return [*out, *self.summary()]

    def summary(self) -> list[Figure]:
        """Saturation, and what was predicted."""
        rounds, capacity = self.saturated, self._capacity
        out = [
            thesis(self._one(LEAST_MU, capacity.least_mu), _THESIS_LIMIT, "table 4.2"),
            thesis(self._one(LIMIT, capacity.limit), _THESIS_LIMIT, "table 4.2"),
            self._one(CALLERS, self._callers, TENSORMQ),
        ]
        for way in (TENSORMQ, ZEROMQ):
            found = rounds.median(way)
            figure = interval_figure(SATURATED, way, 1, found, "1/s", self._labels)
            out.append(thesis(figure, THESIS_PEAK[way], _SOURCE, "its peak"))
            share = scaled(found, 1 / capacity.limit)
            figure = interval_figure(OF_LIMIT, way, 1, share, "x", self._labels)
            out.append(thesis(figure, round(THESIS_PEAK[way] / _THESIS_LIMIT, 3), _SOURCE))
            kept = self.keeps_up(way)
            if kept is not None:
                out.append(self._one(KEEPS_UP, kept, way))
        ratio = self.ratio
        if ratio is not None:
            labels = {**self._labels, "noise": rounds.noise}
            figure = interval_figure(RATIO, TENSORMQ, 1, ratio, "x", labels)
            out.append(thesis(figure, round(_THESIS_RATIO, 3), _SOURCE, "the text says 42%"))
        return out

    def _one(self, name: str, value: float, way: str = "") -> Figure:
        return Figure(name, way, 1, None, None, value, "1/s", 1, labels=self._labels)

    def grid(self) -> Grid:
        """A row per rate: the loads that it means, and what came of it."""
        capacity = self._capacity
        heads = ["x callers", "lambda 1/s", "rho, slowest block", "rho, machine"]
        for way in (TENSORMQ, ZEROMQ):
            heads += [f"{way} came", "answered", "refused %", "p50 ms"]
        rows = []
        for multiple in self.multiples:
            rate = multiple * self._callers
            shared = capacity.shared
            cells = [f"{multiple:g}", digits(rate)]
            cells += [f"{capacity.rho(capacity.bottleneck, rate):.2f}"]
            cells += ["" if shared is None else f"{rate / shared:.2f}"]
            for way in (TENSORMQ, ZEROMQ):
                flows = self._flows[way, multiple]
                times = [t for f in flows for t in f.latency_ms]
                cells += [digits(_middle([f.offered for f in flows]))]
                cells += [digits(_middle([f.answered for f in flows]))]
                cells += [f"{100 * _middle([f.refused for f in flows]):.0f}"]
                cells += [digits(percentile(times, 50)) if times else ""]
            rows.append(tuple(cells))
        return Grid("Throughput by arrival rate (Poisson, open loop)", tuple(heads), rows)

    def says(self) -> str:
        """One line."""
        rounds, limit = self.saturated, self._capacity.limit
        peak = rounds.median(TENSORMQ)
        ratio = self.ratio
        told = "nothing can be said"
        if ratio is not None:
            told = compared(ratio, rounds.noise, "as many", "fewer")
        return (
            f"past saturation {digits(peak.value)} tensors/s with handles (95% "
            f"{bounds(peak.low, peak.high)}, n = {peak.n}), {peak.value / limit:.2f} of the "
            f"predicted limit of {digits(limit)} (thesis: 217 of "
            f"{_THESIS_LIMIT:.0f}); beside whole tensors {told} (thesis: {_THESIS_RATIO:.2f} times)"
        )

    def draw(self) -> Any:
        """Throughput by rate, all visits, with the predicted limit and the line of no loss.

        Raises:
            SystemError_: MISSING_EXTRA without matplotlib.
        """
        page = new_page(8, 4.2)
        ax = page.subplots()
        limit, callers = self._capacity.limit, self._callers
        for way, colour in _COLOURS.items():
            xs = [m * callers for m in self.multiples]
            ys = [_middle([f.answered for f in self._flows[way, m]]) for m in self.multiples]
            ax.plot(xs, ys, "o-", color=colour, label=way, ms=4)
            for m in self.multiples:
                found = [f.answered for f in self._flows[way, m]]
                ax.plot([m * callers] * len(found), found, ".", color=colour, alpha=0.4)
        top = self.multiples[-1] * callers
        ax.plot([0, top], [0, top], color="#bdbdbd", linewidth=1, label="all answered")
        ax.axhline(limit, color="black", linestyle=":", linewidth=1, label="predicted limit")
        ax.set_ylim(0, 1.5 * max(limit, callers))
        ax.set(xlabel="arrivals per second (lambda)", ylabel="answers per second")
        ax.legend(fontsize=8, frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
        return page

    def rows(self) -> list[tuple[Any, ...]]:
        """All visits, for a file."""
        return [
            (
                *(arm, multiple, number, round(multiple * self._callers, 4)),
                *(round(f.offered, 4), round(f.answered, 4), round(f.refused, 4)),
                round(percentile(f.latency_ms, 50), 3) if f.latency_ms else "",
            )
            for (arm, multiple), flows in self._flows.items()
            for number, f in enumerate(flows)
            if not arm.endswith(AGAIN)
        ]


def scaled(found: Interval, factor: float) -> Interval:
    """In another unit."""
    return Interval(found.value * factor, found.low * factor, found.high * factor, found.n)


def _middle(values: Sequence[float]) -> float:
    return median_interval(values).value
