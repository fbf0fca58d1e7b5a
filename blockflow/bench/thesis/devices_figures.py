"""Computing and overhead by path distribution index (thesis, figures 4.15, 4.16). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import LESS_IS_BETTER, MORE_IS_BETTER, Figure, interval_figure
from blockflow.bench.statistics import median_interval, percentile
from blockflow.bench.thesis.bars import WAY_COLOURS
from blockflow.bench.thesis.beside import AGAIN, Rounds, quoted, thesis
from blockflow.bench.thesis.devices_model import Places, index
from blockflow.bench.thesis.rates_figures import REFUSED
from blockflow.bench.thesis.rates_model import refusals, refused_of
from blockflow.client.collector import OK, Record

COMPUTE, OVERHEAD = "computing time", "overhead"
LESS = "overhead of whole tensors, to handles"

THESIS_LESS: Mapping[float, float] = {25.0: 5.26, 50.0: 3.56, 100.0: 2.96}
"""PDI -> how many times less overhead handles have; all else is in pictures only."""

_SOURCE = "figure 4.16"


@dataclass(frozen=True, slots=True)
class Visit:
    """Means over the answers to one client that sent at random, in milliseconds per block.

    Attributes:
        compute: m of eq. 4.1. overhead: o, the way to the block included; both by block.
        total_overhead: the median of the requests' sums over the path.
        refused: share of the requests that were not answered, and are in no time.
    """

    compute: Mapping[str, float]
    overhead: Mapping[str, float]
    total_overhead: float
    refused: float = 0.0

    @classmethod
    def of(cls, records: Sequence[Record]) -> Visit:
        """From requests; those that failed say nothing of times.

        Raises:
            ValueError: none was answered.
        """
        good = [r.timings for r in records if r.outcome == OK]
        if not good:
            raise ValueError("no request was answered")
        compute: dict[str, list[float]] = {}
        overhead: dict[str, list[float]] = {}
        for hop in (hop for path in good for hop in path):
            name = hop.block.rpartition(".")[2]
            compute.setdefault(name, []).append(hop.compute_ms)
            overhead.setdefault(name, []).append(hop.transit_ms + hop.overhead_ms)
        sums = [sum(hop.transit_ms + hop.overhead_ms for hop in path) for path in good]
        return cls(_means(compute), _means(overhead), percentile(sums, 50), refused_of(records))


class Distribution:
    """What was found.

    Args:
        visits: (arm, number of devices) -> visits, one per round.
        places: what the blocks were spread over.
        rate: requests per second, the same everywhere.
    """

    def __init__(
        self,
        visits: Mapping[tuple[str, int], Sequence[Visit]],
        places: Places,
        rate: float,
        labels: Mapping[str, Any],
    ) -> None:
        self._visits = visits
        self._places = places
        self._labels = {**labels, "lambda": round(rate, 4), "spread_over": places.kind}
        self.counts = sorted({n for _, n in visits})
        self.blocks = list(next(iter(visits.values()))[0].compute)

    def pdi(self, count: int) -> float:
        return index(count, len(self.blocks))

    def overhead(self, count: int) -> Rounds:
        """The path's overhead by arm, a number per round."""
        found = {arm: f for (arm, n), f in self._visits.items() if n == count}
        return Rounds({arm: [v.total_overhead for v in f] for arm, f in found.items()})

    def figures(self) -> list[Figure]:
        """Per arm, number of devices and block; then the ratios."""
        out: list[Figure] = []
        for (arm, count), found in self._visits.items():
            for block in self.blocks:
                labels = {**self._labels, "pdi": self.pdi(count), "block": block}
                for name, values in (
                    (COMPUTE, [v.compute[block] for v in found]),
                    (OVERHEAD, [v.overhead[block] for v in found]),
                ):
                    figure = interval_figure(name, arm, 1, values, "ms", labels)
                    out.append(thesis(figure, None, "figures 4.15 and 4.16"))
            labels = {**self._labels, "pdi": self.pdi(count), **LESS_IS_BETTER}
            refused = [v.refused for v in found]
            out.append(interval_figure(REFUSED, arm, 1, refused, "x", labels))
        return [*out, *self.ratios()]

    def refusals(self) -> list[str]:
        """A note for each arm and number of devices of whose requests some were refused."""
        return refusals(
            (f"by {arm} at PDI {self.pdi(n):.0f}", [v.refused for v in found])
            for (arm, n), found in self._visits.items()
        )

    def ratios(self) -> list[Figure]:
        """How much less overhead handles have, by number of devices."""
        out = []
        for count in self.counts:
            rounds = self.overhead(count)
            labels = {**self._labels, "pdi": self.pdi(count), "noise": rounds.noise}
            labels |= MORE_IS_BETTER
            ratio = rounds.ratio(TENSORMQ, ZEROMQ)
            figure = interval_figure(LESS, self._name(count), 1, ratio, "x", labels)
            printed = THESIS_LESS.get(self.pdi(count))
            out.append(thesis(figure, printed, _SOURCE, "on GPUs", "x on GPUs"))
        return out

    def table(self) -> list[Figure]:
        """For a table: the path's sums instead of single blocks."""
        out = []
        for count in self.counts:
            rounds = self.overhead(count)
            for way in (TENSORMQ, ZEROMQ):
                name = f"{OVERHEAD} of the path, {way}"
                found = rounds.median(way)
                out.append(interval_figure(name, self._name(count), 1, found, "ms", self._labels))
                sums = [sum(v.compute.values()) for v in self._visits[way, count]]
                name = f"{COMPUTE} of the path, {way}"
                out.append(interval_figure(name, self._name(count), 1, sums, "ms", self._labels))
        return sorted(out, key=lambda f: f.name) + self.ratios()

    def _name(self, count: int) -> str:
        device = self._places.one if count == 1 else self._places.kind
        return f"PDI {self.pdi(count):.0f} ({len(self.blocks)} blocks, {count} {device})"

    def says(self) -> str:
        """One line."""
        parts = []
        for count in self.counts:
            printed = THESIS_LESS.get(self.pdi(count))
            told = self.overhead(count).compared(TENSORMQ, ZEROMQ, "as much", "less")
            if printed is not None:
                told += quoted(self._labels, f"{printed:g} times as much on GPUs")
            parts.append(f"PDI {self.pdi(count):.0f}: {told}")
        over = f"with blocks on one {self._places.one} or several"
        return f"overhead of whole tensors beside handles, {over}: {'; '.join(parts)}"

    def draw(self) -> Any:
        """Left: computing time per block. Right: overhead. A shade per number of devices."""
        page = new_page(11, 3.8)
        arms = [(way, n) for n in self.counts for way in (TENSORMQ, ZEROMQ)]
        width = 0.8 / len(arms)
        for ax, field in zip(page.subplots(1, 2), ("compute", "overhead"), strict=True):
            for i, (way, count) in enumerate(arms):
                found = self._visits[way, count]
                values = [
                    median_interval([getattr(v, field)[b] for v in found]) for b in self.blocks
                ]
                xs = [at + (i - (len(arms) - 1) / 2) * width for at in range(len(self.blocks))]
                shade = 0.35 + 0.65 * (self.counts.index(count) + 1) / len(self.counts)
                label = f"{way}, PDI {self.pdi(count):.0f}"
                heights = [v.value for v in values]
                ax.bar(xs, heights, 0.9 * width, color=WAY_COLOURS[way], alpha=shade, label=label)
                for x, v in zip(xs, values, strict=True):
                    ax.plot([x, x], [v.low, v.high], color="black", linewidth=0.8)
            ax.set_xticks(range(len(self.blocks)), self.blocks)
            ax.set_ylabel(f"{COMPUTE if field == 'compute' else OVERHEAD}, ms")
        page.axes[0].legend(fontsize=7, frameon=False)
        return page

    def rows(self) -> list[tuple[Any, ...]]:
        """All visits, for a file."""
        return [
            (arm, self.pdi(n), number, b, round(v.compute[b], 4), round(v.overhead[b], 4))
            for (arm, n), found in self._visits.items()
            for number, v in enumerate(found)
            for b in self.blocks
            if not arm.endswith(AGAIN)
        ]


def _means(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in times.items()}
