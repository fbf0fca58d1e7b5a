"""Throughput by arrival rate, and saturation (thesis, figure 4.12): figures and picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import Grid, bounds, digits
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import LESS_IS_BETTER, MORE_IS_BETTER, Figure, interval_figure
from blockflow.bench.statistics import Interval, median_interval, percentile, ratio_interval
from blockflow.bench.thesis.bars import WAY_COLOURS
from blockflow.bench.thesis.beside import AGAIN, Rounds, compared, quoted, thesis
from blockflow.bench.thesis.offline_table import PRINTED, SCRIPTED, SOURCE
from blockflow.bench.thesis.rates_model import Calm, Flow, typical

THROUGHPUT = "throughput"
CARRIED = "answered of what came"
REFUSED = "refused of what came"
SATURATED = "throughput past saturation"
RATIO = "throughput past saturation, to zeromq"
OF_LIMIT = "throughput past saturation, of the predicted limit"
LEAST_MU = "min mu"
LIMIT = "predicted limit"
CALLERS = "throughput of callers that wait"
HELD = "throughput at the highest rate, to the best one"
KEEPS_UP = "highest rate that is kept up with"

PAST = 1.25
"""Rates from this multiple of the callers' rate on count as past saturation."""

KEPT = 0.9
"""A rate is kept up with if this share of what came is answered. In a visit's few seconds some
requests come before and are answered after the part that counts, or the other way round."""

THESIS_PEAK: Mapping[str, float] = {TENSORMQ: 217.0, ZEROMQ: 160.0}
_THESIS_HELD = (97 + 125) / 2 / 160
"""Whole tensors: beyond their peak "noisy results ranging between 125 and 97 tensors/s"."""

_THESIS_RATIO = 217 / 160
_THESIS_LIMIT = 1e3 / max(row.ms for row in PRINTED[SCRIPTED].values())
_SOURCE = "figure 4.12"


class Sweep:
    """What was found.

    Args:
        flows: (arm, multiple of the callers' rate) -> flows, one per round.
        calm: what is predicted, and what callers get that wait; one per round.
        callers: what the rates are multiples of: answers per second to those callers, beforehand.
    """

    def __init__(
        self,
        flows: Mapping[tuple[str, float], Sequence[Flow]],
        calm: Sequence[Calm],
        callers: float,
        labels: Mapping[str, Any],
    ) -> None:
        self._flows = flows
        self._calm = calm
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

    def keeps_up(self, way: str) -> tuple[float, float] | None:
        """The highest rate below which all are kept up with; None if none is.

        Returns:
            The multiple that it was meant to be, and requests per second as they came: of arrivals
            at random fewer may come than were meant to.
        """
        best = None
        for multiple in self.multiples:
            flows = self._flows[way, multiple]
            if sum(f.answered for f in flows) < KEPT * sum(f.offered for f in flows):
                break
            best = multiple, fmean(f.offered for f in flows)
        return best

    def figures(self) -> list[Figure]:
        """Per arm and rate; then saturation beside the prediction and the thesis."""
        out: list[Figure] = []
        for (arm, multiple), flows in self._flows.items():
            labels = {**self._labels, "times_callers": multiple}
            labels["lambda"] = round(multiple * self._callers, 4)
            for name, values, unit, better in (
                (THROUGHPUT, [f.answered for f in flows], "1/s", MORE_IS_BETTER),
                (CARRIED, [f.carried for f in flows], "x", MORE_IS_BETTER),
                (REFUSED, [f.refused for f in flows], "x", LESS_IS_BETTER),
            ):
                out.append(interval_figure(name, arm, 1, values, unit, labels | better))
        return [*out, *self.summary()]

    def summary(self) -> list[Figure]:
        """Saturation, and what was predicted."""
        rounds, capacities = self.saturated, [c.capacity for c in self._calm]
        out = [
            thesis(
                self._by_rounds(LEAST_MU, [c.least_mu for c in capacities]), _THESIS_LIMIT, SOURCE
            ),
            thesis(self._by_rounds(LIMIT, [c.limit for c in capacities]), _THESIS_LIMIT, SOURCE),
            self._by_rounds(CALLERS, [c.callers for c in self._calm], TENSORMQ),
        ]
        for way in (TENSORMQ, ZEROMQ):
            found = rounds.median(way)
            figure = interval_figure(SATURATED, way, 1, found, "1/s", self._labels)
            out.append(thesis(figure, THESIS_PEAK[way], _SOURCE, "its peak"))
            more = {**self._labels, **MORE_IS_BETTER}
            figure = interval_figure(OF_LIMIT, way, 1, self.of_limit(way), "x", more)
            out.append(thesis(figure, round(THESIS_PEAK[way] / _THESIS_LIMIT, 3), _SOURCE))
            held = self.held(way)
            if held is not None:
                figure = interval_figure(HELD, way, 1, held, "x", more)
                printed = round(_THESIS_HELD, 2) if way == ZEROMQ else None
                out.append(thesis(figure, printed, _SOURCE, "97 to 125 of 160" if printed else ""))
            kept = self.keeps_up(way)
            if kept is not None:
                made = Figure.of(KEEPS_UP, way, kept[1], "1/s", len(self._calm), batch=1)
                out.append(replace(made, labels=self._labels))
        ratio = self.ratio
        if ratio is not None:
            labels = {**self._labels, "noise": rounds.noise}
            figure = interval_figure(RATIO, TENSORMQ, 1, ratio, "x", labels)
            out.append(thesis(figure, round(_THESIS_RATIO, 3), _SOURCE, "the text says 42%"))
        return out

    def of_limit(self, way: str) -> Interval:
        """Answers past saturation of what the same round's predicted limit is."""
        rounds = self.saturated
        limits = [c.capacity.limit for c in self._calm][rounds.cut :]
        return ratio_interval(limits, rounds.of(way))

    def held(self, way: str) -> Interval | None:
        """Answers at the highest rate, of what the way answers at the rate that suits it best on
        the whole; 1: what comes too much does no harm. None where nothing was answered."""
        answered = {m: [f.answered for f in self._flows[way, m]] for m in self.multiples}
        best = max(self.multiples, key=lambda m: median(answered[m]))
        pairs = zip(answered[best], answered[self.multiples[-1]], strict=True)
        shares = [last / most for most, last in pairs if most]
        return median_interval(shares) if shares else None

    def _by_rounds(self, name: str, values: Sequence[float], way: str = "") -> Figure:
        return interval_figure(name, way, 1, values, "1/s", self._labels)

    def grid(self) -> Grid:
        """A row per rate: the loads that it means, and what came of it."""
        capacity = typical([c.capacity for c in self._calm])
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
                cells += [digits(median([f.offered for f in flows]))]
                cells += [digits(median([f.answered for f in flows]))]
                cells += [f"{100 * median([f.refused for f in flows]):.0f}"]
                cells += [digits(percentile(times, 50)) if times else ""]
            rows.append(tuple(cells))
        return Grid("Throughput by arrival rate (Poisson, open loop)", tuple(heads), rows)

    def says(self) -> str:
        """One line."""
        rounds, limit = self.saturated, median_interval([c.capacity.limit for c in self._calm])
        peak, share = rounds.median(TENSORMQ), self.of_limit(TENSORMQ)
        ratio = self.ratio
        told = "nothing can be said"
        if ratio is not None:
            told = compared(ratio, rounds.noise, "as many", "fewer")
        return (
            f"past saturation {digits(peak.value)} tensors/s with handles (95% "
            f"{bounds(peak.low, peak.high)}, n = {peak.n}), {share.value:.2f} of the "
            f"predicted limit (95% {bounds(share.low, share.high)}) of {digits(limit.value)} (95% "
            f"{bounds(limit.low, limit.high)})"
            + quoted(self._labels, f"{THESIS_PEAK[TENSORMQ]:.0f} of {_THESIS_LIMIT:.0f}")
            + f"; beside whole tensors {told}"
            + quoted(self._labels, f"{_THESIS_RATIO:.2f} times as many")
            + self._unsaturated()
        )

    def _unsaturated(self) -> str:
        """Ways that keep up with rates which count as past saturation: their mean is no peak."""
        kept = {way: self.keeps_up(way) or (0.0, 0.0) for way in (TENSORMQ, ZEROMQ)}
        told = [f"{way} kept up with {digits(r)}/s" for way, (m, r) in kept.items() if m >= PAST]
        if not told:
            return ""
        return f"; of rates that count as past saturation {', '.join(told)}: more may be possible"

    def draw(self) -> Any:
        """Throughput by rate: all visits and, by the rate that was meant, their means; with the
        predicted limit and the line of no loss."""
        page = new_page(8, 4.2)
        ax = page.subplots()
        callers = self._callers
        limit = median([c.capacity.limit for c in self._calm])
        top = 0.0
        for way, colour in WAY_COLOURS.items():
            # At random more or fewer come than were meant to: what came is where a dot belongs.
            flows = [self._flows[way, m] for m in self.multiples]
            came = [f.offered for one in flows for f in one]
            answered = [f.answered for one in flows for f in one]
            ax.plot(came, answered, ".", color=colour, alpha=0.4)
            xs = [fmean(f.offered for f in one) for one in flows]
            ys = [fmean(f.answered for f in one) for one in flows]
            ax.plot(xs, ys, "o-", color=colour, label=way, ms=4)
            top = max(top, *came)
        ax.plot([0, top], [0, top], color="#bdbdbd", linewidth=1, label="all answered")
        ax.axhline(limit, color="black", linestyle=":", linewidth=1, label="predicted limit")
        ax.set_ylim(0, 1.5 * max(limit, callers))
        ax.set(xlabel="arrivals per second, as they came", ylabel="answers per second")
        ax.legend(fontsize=8, frameon=False)
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
