"""Figures of the stored results as a document's prose quotes them: found by their labels, rounded,
put in words; and changed, to see whether a test would notice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from blockflow.bench.batching.figures import NOTE
from blockflow.bench.results import Figure, ResultFile, Run

DOCS = Path(__file__).resolve().parents[1] / "docs"
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class Stored:
    """Figures, each found by what tells it from all others; ``asked`` remembers for which."""

    def __init__(self, found: Iterable[Figure]) -> None:
        self.figures = list(found)
        self.asked: list[Figure] = []

    def all(self, name: str, mode: str | None = None, **labels: object) -> list[Figure]:
        """Those of a name with these labels, whatever others they have.

        Raises:
            LookupError: there is none.
        """
        found = [
            g
            for g in self.figures
            if g.name == name
            and mode in (None, g.mode)
            and all(g.labels.get(label) == value for label, value in labels.items())
        ]
        if not found:
            raise LookupError(f"no figure {name!r} of {mode!r} with {labels}")
        self.asked += found
        return found

    def one(self, name: str, mode: str, **labels: object) -> Figure:
        """The only one.

        Raises:
            LookupError: there is none, or more than one.
        """
        found = self.all(name, mode, **labels)
        if len(found) > 1:
            raise LookupError(f"{len(found)} figures {name!r} of {mode!r} with {labels}")
        return found[0]

    def value(self, name: str, mode: str, **labels: object) -> float:
        return self.one(name, mode, **labels).value

    def note(self, experiment: str, pattern: str) -> Sequence[str]:
        """The groups of a pattern in the only note of an experiment that has it.

        Raises:
            LookupError: none has it, or more than one.
        """
        notes = [g for g in self.figures if g.name == NOTE and g.labels["experiment"] == experiment]
        found = [(g, match) for g in notes if (match := re.search(pattern, g.mode))]
        if len(found) != 1:
            raise LookupError(f"{len(found)} notes of {experiment!r} say {pattern!r}")
        self.asked.append(found[0][0])
        return found[0][1].groups()


def read_figures(names: Iterable[str]) -> list[Figure]:
    """All that is stored under these names."""
    files = (ResultFile(DOCS / "results" / f"{name}.jsonl", name) for name in names)
    return [figure for file in files for run in file.runs() for figure in _figures_of(run)]


def _figures_of(run: Run) -> Iterator[Figure]:
    """What is about a run as a whole, as the fixed work is, stands for each of its experiments:
    otherwise nobody could tell it from another run's."""
    experiments = {g.labels["experiment"] for g in run.figures if "experiment" in g.labels}
    for g in run.figures:
        if "experiment" in g.labels:
            yield g
        else:
            yield from (replace(g, labels={**g.labels, "experiment": e}) for e in experiments)


def changed(figure: Figure) -> Iterator[Figure]:
    """The same with other values: somewhat, and so much that any comparison comes out otherwise.
    Of a note the long numbers, for the short ones say which load it is about."""
    if figure.name == NOTE:
        yield replace(figure, mode=re.sub(r"\d{2,}", lambda m: str(int(m[0]) + 1), figure.mode))
        return
    low, high = figure.interval.low, figure.interval.high
    for factor, plus in ((1.5, 0.0), (0.5, 0.0), (1.0, 1e3), (1e-3, 0.0)):
        value, least, most = (x * factor + plus for x in (figure.value, low, high))
        yield replace(figure, value=value, low=least, high=most)


def page_text(name: str) -> str:
    """A page as one line."""
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


def less(ratio: float) -> str:
    """By how many per cent, whole ones."""
    return f"{100 * (1 - ratio):z.0f}"


def more(ratio: float) -> str:
    return f"{100 * (ratio - 1):z.0f}"


def listed(texts: Iterable[str]) -> str:
    *first, last = texts
    return f"{', '.join(first)} and {last}" if first else last


def word(count: int) -> str:
    return _WORDS[count] if count < len(_WORDS) else str(count)
