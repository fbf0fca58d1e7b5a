"""From the samples of ``make bench-hops`` to figures and tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockflow.bench import legs
from blockflow.bench.calibration import steadiness_of
from blockflow.bench.echo_chain import CONDITIONS, HANDLES, MIDDLES, SHORT, WARM, WAYS, HopSample
from blockflow.bench.grid import Grid, Rows, bounds, ms, size_text, with_bounds
from blockflow.bench.kpi_reader import BYTES, COPIES, COPIES_IN, Counted, copies_text
from blockflow.bench.results import LESS_IS_BETTER, Figure, bursts_figure, interval_figure
from blockflow.bench.statistics import (
    MIN_PAIRS,
    Verdict,
    difference_interval,
    judge,
    noise_of,
    ratio_interval,
)

HOP = "hop"
SLOPE = "hop by slope"
AGREE = "hop as accounted, less by slope"
TO_BARE = "hop to bare message"
GROWTH = "hop at the largest size to the smallest"
NOISE = "bare message to itself"

BARE, AGAIN = "bare message, ipc", "bare message, ipc, again"
POLLED, BARE_TCP = "bare message, ipc, polled", "bare message, tcp"
FRAME, QUEUE = "bare frame, ipc", "torch.multiprocessing queue"
MESSAGES = (BARE, AGAIN, POLLED, BARE_TCP)
BASELINES = (FRAME, QUEUE)

AIM_TO_BARE = 1.5
AIM_GROWTH = 1.1
"""The aims: a hop by handle costs at most 1.5 bare messages, and the same at every size."""


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What was measured: a way, a size in bytes (0: the small message), a condition."""

    way: str
    size: int
    condition: str


@dataclass(slots=True)
class Track:
    """A key's samples by round, in milliseconds.

    ``hop``: the hop itself. ``short`` and ``long``: end to end less compute, with few and with many
    middle blocks; bare messages have none.
    """

    hop: dict[int, list[float]] = field(default_factory=dict)
    short: dict[int, list[float]] = field(default_factory=dict)
    long: dict[int, list[float]] = field(default_factory=dict)

    def add(self, number: int, short: Sequence[HopSample], long: Sequence[HopSample]) -> None:
        self.hop[number] = [s.hop for s in long]
        self.short[number] = [s.rest for s in short]
        self.long[number] = [s.rest for s in long]


Tracks = dict[Key, Track]


def figures(tracks: Tracks, counted: Mapping[tuple[str, int], Counted]) -> list[Figure]:
    """All figures of a run."""
    again = _paired(tracks, Key(BARE, 0, WARM), Key(AGAIN, 0, WARM))
    same = ratio_interval(*again)
    noise = noise_of(same)
    out = [interval_figure(NOISE, AGAIN, None, same, "x", {"noise": noise})]
    for key, track in tracks.items():
        labels = {"bytes": key.size, "condition": key.condition}
        out.append(bursts_figure(HOP, key.way, list(track.hop.values()), labels))
        if not track.long:
            continue
        short, long = _medians(track.short), _medians(track.long)
        by_slope = [(long[r] - short[r]) / (MIDDLES - SHORT) for r in long]
        found = difference_interval([0.0] * len(by_slope), by_slope)
        out.append(interval_figure(SLOPE, key.way, None, found, "ms", labels))
        accounted = _medians(track.hop)
        apart = difference_interval(by_slope, [accounted[r] for r in long])
        told = {} if apart.n < MIN_PAIRS else {"agree": apart.low <= 0 <= apart.high}
        out.append(interval_figure(AGREE, key.way, None, apart, "ms", {**labels, **told}))
        out += _to_bare(tracks, key, noise)
    out += _growth(tracks, noise)
    for (way, size), count in counted.items():
        labels = {"bytes": size, "condition": WARM}
        for name, value, unit in count.named():
            out.append(Figure.of(name, way, value, unit, 1, labels))
    return out


def _to_bare(tracks: Tracks, key: Key, noise: float) -> list[Figure]:
    """Paired with the bare message of the same transport and condition."""
    transport = next((w.transport for w in WAYS if w.name == key.way), "ipc")
    bare = Key(BARE_TCP if transport == "tcp" else BARE, 0, key.condition)
    if bare not in tracks:
        return []
    found = ratio_interval(*_paired(tracks, bare, key))
    labels: dict[str, object] = {"bytes": key.size, "condition": key.condition, **LESS_IS_BETTER}
    if key.way == HANDLES.name and key.condition == WARM:
        verdict = judge(found, AIM_TO_BARE, noise)
        labels |= {"goal": AIM_TO_BARE, "verdict": str(verdict), "noise": noise}
    return [interval_figure(TO_BARE, key.way, None, found, "x", labels)]


def _growth(tracks: Tracks, noise: float) -> list[Figure]:
    sizes = sorted(k.size for k in tracks if k.way == HANDLES.name and k.condition == WARM)
    if len(sizes) < 2:
        return []
    small, large = (Key(HANDLES.name, size, WARM) for size in (sizes[0], sizes[-1]))
    found = ratio_interval(*_paired(tracks, small, large))
    verdict = judge(found, AIM_GROWTH, noise)
    labels = {"from": sizes[0], "bytes": sizes[-1], "condition": WARM}
    labels |= {"goal": AIM_GROWTH, "verdict": str(verdict), "noise": noise}
    return [interval_figure(GROWTH, HANDLES.name, None, found, "x", labels)]


def _medians(rounds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {r: statistics.median(times) for r, times in rounds.items()}


def _paired(tracks: Tracks, base: Key, other: Key) -> tuple[list[float], list[float]]:
    """Medians of the rounds that both took part in."""
    a, b = _medians(tracks[base].hop), _medians(tracks[other].hop)
    common = [r for r in a if r in b]
    return [a[r] for r in common], [b[r] for r in common]


def time_grid(found: Iterable[Figure]) -> Grid:
    """One row per size and way; the conditions are columns."""
    index = _Index(found)
    rows = Rows()
    for size, way in index.keys:
        rows.section(size)
        warm = index.at(HOP, way, size)
        others = (index.at(HOP, way, size, condition) for condition in list(CONDITIONS)[1:])
        rows.row(
            size_text(size) if size else "",
            way,
            ms(warm.p50_ms if warm else None),
            bounds(warm.p10_ms, warm.p90_ms) if warm else "",
            *(ms(f.p50_ms if f else None) for f in others),
            str(warm.n) if warm else "",
        )
    heads = ("size", "way", "warm", "p10-p90", *list(CONDITIONS)[1:], "n")
    return Grid("One hop, ms", heads, rows, frozenset({"way"}))


def check_grid(found: Iterable[Figure]) -> Grid:
    """Warm: the hop as accounted beside the slope and the bare message; what was copied."""
    index = _Index(found)
    rows = Rows()
    for size, way in index.keys:
        warm, slope = index.at(HOP, way, size), index.at(SLOPE, way, size)
        ratio, apart = index.at(TO_BARE, way, size), index.at(AGREE, way, size)
        inputs, outputs = index.at(COPIES_IN, way, size), index.at(COPIES, way, size)
        sent = index.at(BYTES, way, size)
        if slope is None or warm is None:
            continue
        rows.row(
            size_text(size),
            way,
            ms(warm.p50_ms),
            ms(slope.value),
            _AGREED[apart.labels.get("agree")] if apart else "",
            with_bounds(ratio.value, ratio.low, ratio.high, 2) if ratio else "",
            copies_text(inputs, outputs),
            size_text(round(sent.value)) if sent else "",
        )
    heads = ("size", "way", "warm", "slope", "agree", "x bare (95%)", "copies", "bytes")
    return Grid("Warm hops, checked and counted", heads, rows, frozenset({"way", "agree"}))


def leg_grid(found: Iterable[Figure]) -> Grid:
    """The way between client and Dispatcher (:mod:`blockflow.bench.legs`), by size and way."""
    by = {(f.name, f.mode, f.labels.get("bytes")): f for f in found}
    rows = Rows()
    for size, way in dict.fromkeys((s, way) for name, way, s in by if name == legs.WHOLE):
        parts = [by.get((n, way, size)) for n in (legs.THERE, legs.BACK, legs.WHOLE)]
        ratio = by.get((legs.RATIO, way, size))
        rows.row(
            size_text(size or 0),
            way,
            *(ms(f.p50_ms if f else None) for f in parts),
            with_bounds(ratio.value, ratio.low, ratio.high, 2) if ratio else "",
            str(parts[-1].n) if parts[-1] else "",
        )
    heads = ("size", "way", "there", "back", "both", "x message (95%)", "n")
    return Grid("Client and Dispatcher, ms", heads, rows, frozenset({"way"}))


_AGREED = {True: "yes", False: "no", None: ""}
"""None: of too few rounds to say."""


class _Index:
    """Figures by name, way, size and condition, and the order in which tables show them."""

    def __init__(self, found: Iterable[Figure]) -> None:
        self._by: dict[tuple[Any, ...], Figure] = {
            (f.name, f.mode, f.labels.get("bytes"), f.labels.get("condition")): f for f in found
        }
        order = [*MESSAGES, *(w.name for w in WAYS), *BASELINES]
        keys = {(size, way) for name, way, size, _ in self._by if name == HOP}
        self.keys: list[tuple[int, str]] = sorted(keys, key=lambda k: (k[0], order.index(k[1])))

    def at(self, name: str, way: str, size: int, condition: str = WARM) -> Figure | None:
        return self._by.get((name, way, size, condition))


def aim_grid(found: Iterable[Figure]) -> Grid:
    """The aims and what this run says of them."""
    rows = []
    for f in found:
        if "verdict" not in f.labels:
            continue
        what = f"{f.name}, {size_text(f.labels['bytes'])}"
        if "from" in f.labels:
            what = f"hop of {size_text(f.labels['bytes'])} to {size_text(f.labels['from'])}"
        goal = f"<= {f.labels['goal']:g}"
        rows.append((what, f"{f.value:.2f}", bounds(f.low, f.high), goal, f.labels["verdict"]))
    heads = ("aim", "measured", "95%", "goal", "verdict")
    return Grid("Aims (handle, ipc, warm)", heads, rows, frozenset({"aim", "verdict"}))


def remarks(found: Iterable[Figure]) -> list[str]:
    """What a reader must know beside the tables."""
    figures_ = list(found)
    out = []
    for f in figures_:
        if f.name == NOISE:
            noise = f.labels["noise"]
            out.append(f"bare messages measured twice differ by up to {noise:.1%}: the run's noise")
    apart = [f for f in figures_ if f.name == AGREE and "agree" in f.labels]
    wrong = [f for f in apart if not f.labels["agree"]]
    if apart:
        out.append(
            f"accounted hop and slope of the end-to-end time agree in {len(apart) - len(wrong)} of "
            f"{len(apart)} cases (95% interval of their difference holds 0)"
        )
    unsure = sum(f.labels.get("verdict") == Verdict.NOISE for f in figures_)
    if unsure:
        out.append(f"{unsure} aims lie within the noise: nothing is concluded about them")
    few = min((f.n for f in figures_ if "verdict" in f.labels), default=MIN_PAIRS)
    if few < MIN_PAIRS:
        out.append(f"a verdict needs {MIN_PAIRS} rounds (--rounds), some aims have only {few}")
    steady = steadiness_of(figures_)
    if steady is not None:
        out.append(steady.sentence())
    return out
