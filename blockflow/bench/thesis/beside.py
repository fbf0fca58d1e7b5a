"""Our figure beside the thesis's: labels, tables, and what may be said of two ways. Pure.

The thesis's numbers come from other machines (GPUs: one Quadro GV100, eight L40S), so milliseconds
are shown side by side and only ratios are spoken of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blockflow.bench.grid import Grid, bounds, digits
from blockflow.bench.results import Figure
from blockflow.bench.statistics import (
    MIN_PAIRS,
    Interval,
    median_interval,
    noise_of,
    ratio_interval,
    warm_up_of,
)

AGAIN = ", again"
"""Behind the name of the way that is measured twice: what equal things differ by in this run."""

THESIS_MODEL = "resnet50"
"""Its figures are of this model, and stand beside no other one's."""


def known(labels: Mapping[str, Any]) -> bool:
    """Whether the thesis's figures may stand beside ours with these labels: a figure that names no
    model is of none, and is the same whatever the model."""
    return labels.get("model", THESIS_MODEL) == THESIS_MODEL


def quoted(labels: Mapping[str, Any], text: str) -> str:
    """What the thesis says, behind what we say of figures with these labels: `` (thesis: 2.8
    times)``; '' where that is of another model."""
    return f" (thesis: {text})" if known(labels) else ""


def thesis(
    figure: Figure, value: float | None, source: str, note: str = "", unit: str = ""
) -> Figure:
    """The same figure with the thesis's beside it, if that is :func:`known`.

    Args:
        value: the thesis's; None where it prints none.
        source: "table 4.3", "text of section 4.2.2".
        note: what differs ("HTTP round trip of the whole model").
        unit: of ``value``, where it is not the figure's.
    """
    labels: dict[str, Any] = {**figure.labels, "of": source}
    if value is not None and known(figure.labels):
        labels["thesis"] = value
        if unit:
            labels["thesis_unit"] = unit
    if note:
        labels["note"] = note
    return replace(figure, labels=labels)


def beside_grid(title: str, figures: Iterable[Figure], head: str = "way") -> Grid:
    """A row per figure: what, way, batch, ours with its interval, the thesis's."""
    found = list(figures)
    batches = any(f.batch is not None for f in found)
    rows = []
    for f in found:
        batch = ("" if f.batch is None else str(f.batch),) if batches else ()
        ours = digits(f.value), bounds(f.low, f.high)
        rows.append((f.name, f.mode, *batch, *ours, thesis_cell(f), f.unit, str(f.n)))
    columns = ("ours", "95%", "thesis", "unit", "n")
    heads = ("what", head, *(("rows",) if batches else ()), *columns)
    return Grid(title, heads, rows, frozenset({"what", head, "unit"}))


def thesis_cell(figure: Figure) -> str:
    """The thesis's figure as a table's cell, with its unit where that is another one."""
    value = figure.labels.get("thesis")
    if value is None:
        return ""
    return f"{digits(value)} {figure.labels.get('thesis_unit', '')}".rstrip()


@dataclass(slots=True)
class Rounds:
    """Milliseconds (or another number) of several ways, a sample of each per round.

    Attributes:
        samples: way -> samples; the n-th of all ways were taken side by side.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def cut(self) -> int:
        """Rounds at the begin that belong to the warm-up of any way (MSER).

        A third of them at most, and never so many that nothing could be concluded from the rest.
        """
        return warm_up_of(self.samples.values())

    def of(self, way: str) -> list[float]:
        """Without the warm-up."""
        return self.samples[way][self.cut :]

    def median(self, way: str) -> Interval:
        return median_interval(self.of(way))

    def ratio(self, base: str, way: str) -> Interval:
        """Median of way / base by rounds."""
        return ratio_interval(self.of(base), self.of(way))

    @property
    def noise(self) -> float:
        """How far the way that was measured twice was from itself; 0 where none was."""
        twice = [w for w in self.samples if w.endswith(AGAIN)]
        return max(
            (noise_of(self.ratio(w.removesuffix(AGAIN), w)) for w in twice),
            default=0.0,
        )

    def compared(self, base: str, way: str, more: str = "slower", less: str = "faster") -> str:
        """What may be said of ``way`` beside ``base``: :func:`compared`."""
        return compared(self.ratio(base, way), self.noise, more, less)


def compared(
    ratio: Interval, noise: float = 0.0, more: str = "slower", less: str = "faster"
) -> str:
    """``2.8 times slower (95% 2.7-2.9)``, or that this run cannot tell.

    Args:
        ratio: of the way to the base.
        noise: a share: how far equal things were apart.
        more, less: what a ratio above or below 1 is called.
    """
    shown = f"95% {bounds(ratio.low, ratio.high)}, n = {ratio.n}"
    if ratio.n < MIN_PAIRS:
        return f"{digits(ratio.value)} times, too few rounds to conclude ({shown})"
    if ratio.low > 1 + noise:
        return f"{digits(ratio.value)} times {more} ({shown})"
    if ratio.high < 1 - noise:
        inverse = f"95% {bounds(1 / ratio.high, 1 / ratio.low)}, n = {ratio.n}"
        return f"{digits(1 / ratio.value)} times {less} ({inverse})"
    return f"not told apart ({digits(ratio.value)} times, {shown}; noise {noise:.1%})"
