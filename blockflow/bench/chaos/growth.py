"""Growth: does memory grow as long as a system runs? A line through medians of the samples. Pure.

Memory jumps while processes die and start, so single samples say nothing. The first part of a run,
in which buffers fill, is left out, and so is a process that still loads; the rest is cut into
windows, and the line goes through their medians. What counts as growth is what lies above a
tolerance with the line's whole 95% interval.

Most of a process's resident memory it shares with its siblings, so a tenth of that is much. Its
heap is judged too, by a tenth of what is its own. What grows is looked for in its anonymous memory,
not in the private one: when the others that share a page die, it becomes private without growth.

A successor begins anew, so a slow leak of a process that is killed now and then shows in no such
line. Whoever lives through a good part of the run is judged by its longest life alone, too. Where
that is the last one it counts nowhere else: buffers (KPIs, remembered results) fill for half an
hour, and those before it were too young for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from blockflow.bench.chaos.watch import PREFIX, MemorySample
from blockflow.bench.statistics import percentile, slope

MIB = 2**20
WARM_UP = 0.2
"""Part of the run that fills buffers and caches."""
WINDOWS = 12
LEAST_WINDOWS = 8
_T = 2.26
"""Student's t for 95% with about ten degrees of freedom."""
_LOADING = 0.75
"""A process below this part of its median memory has not loaded yet."""
_SHARE = 0.1
"""Growth below this part of the median is none: heaps breathe."""
ONE_LIFE = ", one life"
"""Ends the name of a series of one process, without its predecessors and successors."""
_LONG = 0.3
"""Part of the run that a life must have to be judged by itself."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a series may change by over a run, at least: in its unit."""

    unit: str
    floor: float


RSS = Tolerance("MiB", 16.0)
HEAP = Tolerance("MiB", 4.0)
SHARED = Tolerance("MiB", 16.0)
DESCRIPTORS = Tolerance("descriptors", 4.0)


@dataclass(frozen=True, slots=True)
class Growth:
    """One series: its median, and by how much the line rises from begin to end, with the bounds of
    that; ``seconds`` is how long that was, ``tolerance`` what it may be."""

    name: str
    unit: str
    median: float
    value: float
    low: float
    high: float
    seconds: float
    tolerance: float

    @property
    def grows(self) -> bool:
        return self.low > self.tolerance

    @property
    def per_hour(self) -> float:
        return self.value / self.seconds * 3600

    def sentence(self) -> str:
        return (
            f"{self.name} grows: {self.value:+.1f} {self.unit} ({self.low:.1f} to {self.high:.1f}) "
            f"in {self.seconds:.0f} s, from about {self.median:.0f}"
        )


def growth(
    name: str,
    at_s: Sequence[float],
    values: Sequence[float],
    limit: Tolerance,
    own: float | None = None,
) -> Growth | None:
    """The line through a series; None where it is too short or too sparse to judge. The tolerance
    is a share of ``own``; None: of the series' median."""
    if not at_s:
        return None
    begin, end = at_s[0] + WARM_UP * (at_s[-1] - at_s[0]), at_s[-1]
    width = (end - begin) / WINDOWS
    windows: dict[int, list[float]] = {}
    for at, value in zip(at_s, values, strict=True):
        if at >= begin and width > 0:
            windows.setdefault(min(int((at - begin) / width), WINDOWS - 1), []).append(value)
    if len(windows) < LEAST_WINDOWS:
        return None
    xs = [begin + (i + 0.5) * width for i in sorted(windows)]
    ys = [percentile(windows[i], 50) for i in sorted(windows)]
    rise = slope(xs, ys)
    x, y = np.asarray(xs), np.asarray(ys)
    rest = y - y.mean() - rise * (x - x.mean())
    spread = float(np.sqrt((rest**2).sum() / (len(xs) - 2) / ((x - x.mean()) ** 2).sum()))
    seconds = end - begin
    middle = percentile(ys, 50)
    return Growth(
        name,
        limit.unit,
        middle,
        rise * seconds,
        (rise - _T * spread) * seconds,
        (rise + _T * spread) * seconds,
        seconds,
        max(limit.floor, _SHARE * (middle if own is None else own)),
    )


def growths(samples: Iterable[MemorySample]) -> list[Growth]:
    """Resident memory and heap of each process and of long lives, shared memory, descriptors per
    process."""
    samples = list(samples)
    lives = longest_lives(samples)
    series: dict[str, tuple[list[float], list[float], Tolerance]] = {}

    def add(name: str, at_s: float, value: float, limit: Tolerance) -> None:
        ats, values, _ = series.setdefault(name, ([], [], limit))
        ats.append(at_s)
        values.append(value)

    private: dict[str, list[float]] = {}
    for s in samples:
        for memory, of, limit in ((s.by_name, "RSS", RSS), (s.anonymous, "heap", HEAP)):
            for name, value in memory.items():
                title = f"{of}, {name.removeprefix(PREFIX)}"
                alone = name in lives and s.pids.get(name) == lives[name]
                if alone:
                    add(title + ONE_LIFE, s.at_s, value / MIB, limit)
                if not alone or samples[-1].pids.get(name) != lives[name]:
                    add(title, s.at_s, value / MIB, limit)
        for name, own in s.private.items():
            private.setdefault(f"heap, {name.removeprefix(PREFIX)}", []).append(own / MIB)
        add("shared memory", s.at_s, s.run_dir / MIB, SHARED)
        if s.processes:
            add("descriptors per process", s.at_s, s.descriptors / s.processes, DESCRIPTORS)
    found = []
    for name, (ats, values, limit) in series.items():
        if limit is RSS or limit is HEAP:
            least = _LOADING * percentile(values, 50)
            kept = [(at, v) for at, v in zip(ats, values, strict=True) if v >= least]
            ats, values = [at for at, _ in kept], [v for _, v in kept]
        unshared = private.get(name.removesuffix(ONE_LIFE))
        median = percentile(unshared, 50) if unshared else None
        found.append(growth(name, ats, values, limit, median))
    return [g for g in found if g is not None]


def longest_lives(samples: Sequence[MemorySample]) -> dict[str, int]:
    """By name the process that lived longest, where that was a good part of the run and it was not
    the only one of that name."""
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for s in samples:
        for key in s.pids.items():
            begin, _ = spans.get(key, (s.at_s, s.at_s))
            spans[key] = (begin, s.at_s)
    heirs = Counter(name for name, _ in spans)
    least = _LONG * (samples[-1].at_s - samples[0].at_s) if samples else 0.0
    found: dict[str, int] = {}
    for (name, pid), (begin, end) in sorted(spans.items(), key=lambda i: i[1][1] - i[1][0]):
        if heirs[name] > 1 and 0.0 < least <= end - begin:
            found[name] = pid
    return found
