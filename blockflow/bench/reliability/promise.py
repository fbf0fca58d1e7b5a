"""Promise: what is promised, and what a result file says of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blockflow.bench.grid import digits
from blockflow.bench.reliability import figures as names
from blockflow.bench.results import Figure
from blockflow.bench.statistics import Verdict

NOT_MEASURED = "not measured yet"
TOO_SHORT = "too short"
"""Nothing was wrong, but the run was smaller than what is promised."""


class Book:
    """The figures of one result file, by name and mode."""

    def __init__(self, figures: Sequence[Figure]) -> None:
        self.figures = figures
        self._at = {(f.name, f.mode): f for f in figures}

    def at(self, name: str, mode: str) -> Figure:
        """Raises KeyError."""
        return self._at[name, mode]

    def value(self, name: str, mode: str) -> float:
        """Raises KeyError."""
        return self.at(name, mode).value

    def count(self, what: str) -> Figure:
        """One of the reliability benchmark's counts."""
        return self.at(names.COUNT, what)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a promise came to, and whether that is what was promised."""

    text: str
    verdict: str


Find = Callable[[Book], Finding]


@dataclass(frozen=True, slots=True)
class Promise:
    """One row: ``results`` is the file that ``find`` looks into."""

    name: str
    target: str
    results: str
    find: Find


def held(holds: bool, enough: bool = True) -> str:
    """For counts, where no noise is; ``enough`` was tried to say that the promise is kept."""
    if not holds:
        return Verdict.MISSED
    return Verdict.MET if enough else TOO_SHORT


def spread(f: Figure, unit_ms: float = 1.0, unit: str = "ms") -> str:
    """Median, its interval, the worst, and of how many."""
    low, high = f.interval.low / unit_ms, f.interval.high / unit_ms
    parts = f"{digits(f.value / unit_ms)} {unit} ({digits(low)}-{digits(high)})"
    word, worst = _worst(f)
    most = "" if worst is None else f", {word} {digits(worst / unit_ms)}"
    return f"{parts}{most}, n = {f.n}"


def _worst(f: Figure) -> tuple[str, float | None]:
    """The longest in milliseconds where the figure tells it, else the 99th percentile."""
    most = f.labels.get("max")
    return ("p99", f.p99_ms) if most is None else ("at most", float(most))


def within(name: str, mode: str, goal_ms: float, *, seconds: bool = False) -> Find:
    """A duration: met if the longest of all is; missed if the median's whole interval lies above.

    What lies in between, a busy machine's own delay may have done.
    """

    def find(book: Book) -> Finding:
        f = book.at(name, mode)
        text = spread(f, 1e3, "s") if seconds else spread(f)
        worst = _worst(f)[1]
        if (f.value if worst is None else worst) <= goal_ms:
            return Finding(text, Verdict.MET)
        missed = f.interval.low > goal_ms
        return Finding(text, Verdict.MISSED if missed else Verdict.NOISE)

    return find


def find(promise: Promise, stored: Mapping[str, Sequence[Figure]]) -> Finding | None:
    """What was measured of a promise; None where nothing was, or not this."""
    figures = stored.get(promise.results)
    if figures is None:
        return None
    try:
        return promise.find(Book(figures))
    except KeyError:
        return None


def missed(
    promises: Sequence[Promise], results: str, found: Sequence[Figure]
) -> tuple[list[str], bool]:
    """For the end of a benchmark's output: a line for each promise that is its to judge, and
    whether one of them is missed, or was not measured although it should have been."""
    verdicts = [(p, find(p, {results: found})) for p in promises if p.results == results]
    lines = [
        f"{NOT_MEASURED}: {p.name} ({p.target})"
        if f is None
        else f"{f.verdict}: {p.name} ({p.target}): {f.text}"
        for p, f in verdicts
    ]
    return lines, any(f is None or f.verdict == Verdict.MISSED for _, f in verdicts)
