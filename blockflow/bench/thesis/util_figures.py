"""CPU and GPU utilisation (thesis, figure 4.6): figures, the line that is said, picture. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import median_interval
from blockflow.bench.thesis.bars import WAY_COLOURS
from blockflow.bench.thesis.beside import Rounds, quoted, thesis

DISPATCHER = "dispatcher"

BLOCK = "CPU of a block"
DISPATCHER_CPU = "CPU of the Dispatcher"
MEAN = "CPU, mean of the blocks"
MACHINE = "CPU, share of the machine"
PER_REQUEST = "CPU time per inference"
GPU = "GPU utilisation"
RATE = "inferences per second"
MEAN_RATIO = "CPU, mean of the blocks, to zeromq"
GPU_RATIO = "GPU utilisation, to zeromq"
RATE_RATIO = "inferences per second, to zeromq"

_SOURCE = "figure 4.6"
_TEXT = "text of figure 4.6"
_RATE_THESIS, _GPU_THESIS = 2.8, 2.0
_SHORTEST_S = 0.1
"""Between two points of a timeline: ten of the kernel's ticks."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One client that asked again as soon as it was answered, for a while.

    Attributes:
        rate: inferences per second.
        cpu_s: CPU seconds per block, and of the :data:`DISPATCHER`.
        timeline: (seconds, CPU percent of one core, mean of the blocks).
        gpu: (seconds, utilisation of the device in percent) of each look; empty without one.
    """

    seconds: float
    rate: float
    cpu_s: Mapping[str, float]
    timeline: Sequence[tuple[float, float]] = ()
    gpu: Sequence[tuple[float, float]] = ()

    @classmethod
    def of(
        cls,
        looks: Sequence[tuple[float, Mapping[str, float]]],
        rate: float,
        gpu: Sequence[tuple[float, float]] = (),
    ) -> Visit:
        """From CPU times since the start of each process, looked at over and over.

        Raises:
            ValueError: fewer than two looks.
        """
        if len(looks) < 2:
            raise ValueError("a share of CPU time needs two looks")
        (begin, first), (end, last) = looks[0], looks[-1]
        timeline = []
        for (t0, before), (t1, after) in itertools.pairwise(looks):
            blocks = [after[b] - before[b] for b in after if b != DISPATCHER]
            if t1 - t0 >= _SHORTEST_S:
                timeline.append((t1, 100 * statistics.fmean(blocks) / (t1 - t0)))
        spent = {name: last[name] - first[name] for name in last}
        return cls(end - begin, rate, spent, tuple(timeline), tuple(gpu))

    def percent(self, name: str) -> float:
        """Of one core."""
        return 100 * self.cpu_s[name] / self.seconds

    @property
    def blocks(self) -> list[str]:
        return [name for name in self.cpu_s if name != DISPATCHER]

    @property
    def mean_percent(self) -> float:
        """The thesis's figure: the sum over the blocks' processes by their number."""
        return statistics.fmean(self.percent(b) for b in self.blocks)

    def machine_percent(self, cores: int) -> float:
        """All processes of the way and the Dispatcher, of all cores."""
        return 100 * sum(self.cpu_s.values()) / self.seconds / cores

    @property
    def ms_per_request(self) -> float:
        """CPU milliseconds of all these processes for one inference."""
        return 1e3 * sum(self.cpu_s.values()) / (self.rate * self.seconds)

    @property
    def gpu_percent(self) -> float:
        """Mean over the looks; 0 is a figure like any other.

        Raises:
            ValueError: there were no looks.
        """
        if not self.gpu:
            raise ValueError("no look at the GPU")
        return statistics.fmean(percent for _, percent in self.gpu)


class Utilisation:
    """What was found.

    Args:
        visits: arm -> visits, one per round; the arms' n-th visits were side by side.
        cores: that the processes may use.

    Attributes:
        mean, rate: by rounds.
        gpu: utilisation in percent, of the rounds in which every visit was looked at; None where
            the GPU was never seen.
        unseen: rounds in which it was not.
    """

    def __init__(
        self, visits: Mapping[str, Sequence[Visit]], cores: int, labels: Mapping[str, Any]
    ) -> None:
        self._visits = visits
        self._cores = cores
        self._labels = labels
        self.mean = self._rounds(lambda v: v.mean_percent)
        self.rate = self._rounds(lambda v: v.rate)
        rounds = list(zip(*visits.values(), strict=True))
        seen = [i for i, side_by_side in enumerate(rounds) if all(v.gpu for v in side_by_side)]
        self.unseen = len(rounds) - len(seen)
        self.gpu = (
            Rounds({arm: [found[i].gpu_percent for i in seen] for arm, found in visits.items()})
            if seen
            else None
        )

    def _rounds(self, value: Any) -> Rounds:
        return Rounds({arm: [value(v) for v in found] for arm, found in self._visits.items()})

    def figures(self) -> list[Figure]:
        """Per way: each block, their mean, the whole; then the ratios."""
        out: list[Figure] = []
        for way, found in self._visits.items():
            out += self._way(way, found)
        if self.counted:
            note = "its value is not printed"
            out.append(self._ratio(MEAN_RATIO, self.mean, None, _SOURCE, note))
        note = "of the pipeline's time"
        out.append(self._ratio(RATE_RATIO, self.rate, _RATE_THESIS, _TEXT, note))
        if self.gpu is not None and has_ratios(self.gpu):
            out.append(self._ratio(GPU_RATIO, self.gpu, _GPU_THESIS, _TEXT))
        return out

    @property
    def counted(self) -> bool:
        """Whether every visit was long enough for the kernel's tick to show CPU time at all."""
        return has_ratios(self.mean)

    def _way(self, way: str, found: Sequence[Visit]) -> list[Figure]:
        out = []
        for name in found[0].cpu_s:
            labels = {**self._labels, "block": name}
            share = [v.percent(name) for v in found]
            what = DISPATCHER_CPU if name == DISPATCHER else f"{BLOCK}: {name}"
            out.append(interval_figure(what, way, 1, share, "%", labels))
        numbers: list[tuple[str, list[float], str]] = [
            (MEAN, [v.mean_percent for v in found], "%"),
            (MACHINE, [v.machine_percent(self._cores) for v in found], "%"),
            (PER_REQUEST, [v.ms_per_request for v in found], "ms"),
            (RATE, [v.rate for v in found], "1/s"),
        ]
        if self.gpu is not None:
            numbers.append((GPU, self.gpu.samples[way], "%"))
        for name, values, unit in numbers:
            figure = interval_figure(name, way, 1, values, unit, self._labels)
            out.append(thesis(figure, None, _SOURCE))
        return out

    def _ratio(
        self, name: str, rounds: Rounds, printed: float | None, source: str, note: str = ""
    ) -> Figure:
        labels = {**self._labels, "noise": rounds.noise}
        found = rounds.ratio(ZEROMQ, TENSORMQ)
        return thesis(interval_figure(name, TENSORMQ, 1, found, "x", labels), printed, source, note)

    def says(self) -> str:
        """One line."""
        handles, whole = self.mean.median(TENSORMQ), self.mean.median(ZEROMQ)
        text = "visits too short to be compared"
        if self.counted:
            text = self.mean.compared(ZEROMQ, TENSORMQ, "as busy", "less busy")
        line = (
            f"one client keeps a block's process busy for {handles.value:.0f}% of a core with "
            f"handles and {whole.value:.0f}% with whole tensors: with handles {text}"
        )
        if self.gpu is None:
            return line
        text = "idle in some visit: not compared"
        if has_ratios(self.gpu):
            text = self.gpu.compared(ZEROMQ, TENSORMQ, "as busy", "less busy")
        printed = quoted(self._labels, f"{_GPU_THESIS:g} times as busy")
        return f"{line}; the GPU with handles {text}{printed}"

    def draw(self) -> Any:
        """Left: CPU over time, the mean of the blocks. Right: each process, by way. Between them
        the GPU over time, where it was seen."""
        seen = self.gpu is not None
        page = new_page(14 if seen else 10, 3.8)
        left, *middle, right = page.subplots(1, 3 if seen else 2)
        ways = [w for w in (TENSORMQ, ZEROMQ) if w in self._visits]
        self._draw_timelines(left, ways, lambda v: v.timeline)
        left.set(ylabel="CPU, % of a core, mean of the blocks")
        for ax in middle:
            self._draw_timelines(ax, ways, lambda v: v.gpu)
            ax.set(ylabel="GPU utilisation, %")
        names = list(self._visits[ways[0]][0].cpu_s)
        for i, way in enumerate(ways):
            values = [median_interval([v.percent(n) for v in self._visits[way]]) for n in names]
            xs = [at + (i - (len(ways) - 1) / 2) * 0.38 for at in range(len(names))]
            right.bar(xs, [v.value for v in values], 0.36, color=WAY_COLOURS[way], label=way)
            for x, v in zip(xs, values, strict=True):
                right.plot([x, x], [v.low, v.high], color="black", linewidth=1)
        right.set_xticks(range(len(names)), names, fontsize=8)
        right.set_ylabel("CPU, % of a core")
        return page

    def _draw_timelines(
        self,
        ax: Any,
        ways: Sequence[str],
        points: Callable[[Visit], Sequence[tuple[float, float]]],
    ) -> None:
        """A line per visit."""
        for way in ways:
            for number, visit in enumerate(self._visits[way]):
                xs, ys = [t for t, _ in points(visit)], [p for _, p in points(visit)]
                label = way if number == 0 else None
                ax.plot(xs, ys, color=WAY_COLOURS[way], linewidth=1, alpha=0.7, label=label)
        ax.set(xlabel="seconds of the visit")
        ax.set_ylim(bottom=0)
        ax.legend(fontsize=8, frameon=False)

    def rows(self) -> list[tuple[Any, ...]]:
        """The timelines, for a file: CPU or GPU, way, round, seconds, percent."""
        return [
            (what, way, number, round(at, 3), round(percent, 2))
            for way, found in self._visits.items()
            for number, visit in enumerate(found)
            for what, points in (("CPU", visit.timeline), ("GPU", visit.gpu))
            for at, percent in points
        ]


def has_ratios(rounds: Rounds) -> bool:
    """Whether no sample is 0: nothing can be divided by it."""
    return all(all(values) for values in rounds.samples.values())
