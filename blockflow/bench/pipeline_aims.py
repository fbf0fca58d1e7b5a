"""The aims of ``make bench`` and what its figures say of them. Pure.

Judged are figures, not samples, so that results of before there were these aims have verdicts too;
what such results lack is said to be not measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockflow.bench.client_import import CLIENT_IMPORT
from blockflow.bench.grid import Grid
from blockflow.bench.hop_figures import AIM_GROWTH
from blockflow.bench.kpi_reader import COPIES, COPIES_IN
from blockflow.bench.pipeline_figures import (
    ACCOUNTED,
    HOP,
    LATENCY,
    LESS,
    ONE_WORKER,
    ONE_WORKER_AWAKE,
    RATIO,
    TENSORMQ,
    TENSORMQ_AWAKE,
    VERDICT_HEADS,
    ZEROMQ,
    Book,
    engine_of,
    goal_text,
    verdict_cells,
)
from blockflow.bench.reliability.promise import NOT_MEASURED
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import Interval, judge, judge_value
from blockflow.bench.worker_start import READY_WITHOUT_LOAD, USS

AIM = "aim"
WORKER, CLIENT = "one more worker", "client"

BATCHES = (1, 8, 32)
AIM_PARTS = 0.05
"""The parts add up to the end-to-end time, but for this share of it."""

_MB_PER_MIB = 2**20 / 1e6
_TAGS = ("engine", "precision", "model")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run has found of an aim.

    Attributes:
        found: without an interval where ``each``.
        noise: the run's own, a share; None: there is none.
        each: the aim is one for each that was looked at, not for their median: one is enough.
    """

    found: Interval
    noise: float | None = None
    each: bool = False


Look = Callable[[Book, str], Seen | None]
"""Finds it for an engine; None where it was not measured."""


@dataclass(frozen=True, slots=True)
class Aim:
    """One row of the table.

    Attributes:
        mode: what is held to the goal, of whom; with ``rows`` it tells an aim from the others.
        rows: per request; None where the aim is about all of them, or about none.
        goal: the most in ``unit``, with ``at_least`` the least.
        look: finds what was measured.
    """

    mode: str
    rows: int | None
    goal: float
    unit: str
    look: Look
    at_least: bool = False

    def judge(self, book: Book, engine: str, tags: Mapping[str, Any]) -> Figure | None:
        """The figure with its verdict; None where nothing was measured."""
        seen = self.look(book, engine)
        if seen is None:
            return None
        found = seen.found
        if seen.each:
            verdict = judge_value(found.value, self.goal, at_least=self.at_least)
        else:
            verdict = judge(found, self.goal, seen.noise or 0.0, at_least=self.at_least)
        labels = {**tags, "goal": self.goal, "verdict": str(verdict)}
        if seen.noise is not None:
            labels["noise"] = seen.noise
        if self.at_least:
            labels["at_least"] = True
        figure = interval_figure(AIM, self.mode, self.rows, found, self.unit, labels)
        return figure if found.low < found.high else replace(figure, low=None, high=None)


def _at(name: str, way: str, rows: int) -> Look:
    def look(book: Book, engine: str) -> Seen | None:
        figure = book.at(name, engine, rows, way)
        return Seen(figure.interval, _noise(book, engine, rows)) if figure else None

    return look


def _noise(book: Book, engine: str, rows: int) -> float:
    """How far the in-process way seemed to be from itself in these rounds."""
    figure = book.at(RATIO, engine, rows, TENSORMQ)
    return float(figure.labels.get("noise", 0.0)) if figure else 0.0


def _growth(book: Book, engine: str) -> Seen | None:
    """The hop with the most rows beside that with the fewest.

    What copying into the slot takes may be added to it, which nobody measures: so where an engine
    does not write into the slot (a copy was counted), nothing is judged. The two are of different
    rounds, hence no pairs: the interval is as wide as both of theirs allow.
    """
    few, many = BATCHES[0], BATCHES[-1]
    base, most = (book.at(HOP, engine, rows, TENSORMQ) for rows in (few, many))
    outputs, inputs = (book.at(name, engine, many, TENSORMQ) for name in (COPIES, COPIES_IN))
    if base is None or most is None or outputs is None:
        return None
    if outputs.value or (inputs is not None and inputs.value):
        return None
    a, b = base.interval, most.interval
    ratio = Interval(b.value / a.value, b.low / a.high, b.high / a.low, min(a.n, b.n))
    return Seen(ratio, max(_noise(book, engine, rows) for rows in (few, many)))


def _parts(book: Book, engine: str) -> Seen | None:
    """How far the parts are from the whole, on the way and with the rows where it is worst.

    Both are of the same requests, so the machine's drift is in neither: there is no noise.
    """
    shares = [f for f in book.figures if f.name == ACCOUNTED and engine_of(f) == engine]
    # One that has missed is worse than one that reaches farther, but may have met.
    worst = max(
        (_off(f.interval) for f in shares),
        key=lambda off: (max(off.low, AIM_PARTS), off.high),
        default=None,
    )
    return None if worst is None else Seen(worst)


def _off(share: Interval) -> Interval:
    """A share's distance from 1."""
    ends = sorted((abs(share.low - 1), abs(share.high - 1)))
    low = 0.0 if share.low <= 1 <= share.high else ends[0]
    return Interval(abs(share.value - 1), low, ends[1], share.n)


def _slowest(name: str) -> Look:
    def look(book: Book, _: str) -> Seen | None:
        figure = next((f for f in book.figures if f.name == name), None)
        if figure is None or figure.p99_ms is None:
            return None
        slowest = figure.p99_ms
        return Seen(Interval(slowest, slowest, slowest, figure.n), each=True)

    return look


def _largest(book: Book, _: str) -> Seen | None:
    figure = next((f for f in book.figures if f.name == USS), None)
    if figure is None:
        return None
    size = figure.value * _MB_PER_MIB
    return Seen(Interval(size, size, size, figure.n), each=True)


def _each(way: str, what: str, name: str, goal: float, unit: str) -> tuple[Aim, ...]:
    """The same aim for each number of rows."""
    return tuple(Aim(f"{way}: {what}", n, goal, unit, _at(name, way, n)) for n in BATCHES)


OF_ENGINES: tuple[Aim, ...] = (
    *_each(TENSORMQ, "hop, ms", HOP, 0.4, "ms"),
    *_each(TENSORMQ_AWAKE, "hop, ms", HOP, 0.4, "ms"),
    Aim(f"{TENSORMQ}: hop growth", BATCHES[-1], AIM_GROWTH, "x", _growth),
    *_each(TENSORMQ, "latency", RATIO, 1.10, "x"),
    *_each(TENSORMQ_AWAKE, "latency", RATIO, 1.10, "x"),
    *_each(ONE_WORKER, "latency", RATIO, 1.03, "x"),
    *_each(ONE_WORKER_AWAKE, "latency", RATIO, 1.03, "x"),
    Aim(f"{ZEROMQ}/{TENSORMQ}: hop", 8, 5.0, "x", _at(LESS, ZEROMQ, 8), at_least=True),
    Aim("parts to whole, off", None, AIM_PARTS, "1", _parts),
)
"""Judged for every engine."""

OF_WORKERS: tuple[Aim, ...] = (
    Aim("ready beside load, ms", None, 300.0, "ms", _slowest(READY_WITHOUT_LOAD)),
    Aim("private memory, MB", None, 20.0, "MB", _largest),
)
"""Of one more worker, beside its artifact's load, and beside its parameters and buffers."""

OF_CLIENT: tuple[Aim, ...] = (Aim("imported, ms", None, 300.0, "ms", _slowest(CLIENT_IMPORT)),)
"""Of the SDK in a program that has imported nothing."""

_OF = {**dict.fromkeys(OF_WORKERS, WORKER), **dict.fromkeys(OF_CLIENT, CLIENT)}


def _asked(book: Book) -> Iterator[tuple[str, Mapping[str, Any], Aim]]:
    """Engine, labels and aim of every row."""
    engines: dict[str, Mapping[str, Any]] = {}
    for f in book.figures:
        if f.name == LATENCY:
            engines.setdefault(engine_of(f), {t: f.labels[t] for t in _TAGS if t in f.labels})
    for engine, tags in (engines or {"": {}}).items():
        for aim in OF_ENGINES:
            yield engine, tags, aim
    for aim in _OF:
        yield "", {}, aim


def judged(found: Iterable[Figure]) -> list[Figure]:
    """A figure with its verdict for every aim of which ``found`` has what it is about."""
    book = Book(found)
    verdicts = (aim.judge(book, engine, tags) for engine, tags, aim in _asked(book))
    return [f for f in verdicts if f is not None]


def aim_grid(found: Iterable[Figure]) -> Grid:
    """Every aim and what the run said of it, or what is said now of a run that judged nothing."""
    figures = list(found)
    if not any(f.name == AIM for f in figures):
        figures += judged(figures)
    book = Book(figures)
    rows = []
    for engine, _, aim in _asked(book):
        f = book.at(AIM, engine, aim.rows, aim.mode)
        nothing = ("", "", goal_text(aim.goal, at_least=aim.at_least), "", NOT_MEASURED)
        cells = nothing if f is None else verdict_cells(f)
        of, rows_text = _OF.get(aim, engine), "" if aim.rows is None else str(aim.rows)
        rows.append((of, aim.mode, rows_text, *cells))
    heads = ("of", "aim", "rows", *VERDICT_HEADS)
    return Grid("Aims", heads, rows, frozenset({"of", "aim", "verdict"}))
