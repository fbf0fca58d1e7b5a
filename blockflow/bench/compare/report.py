"""What a comparison says: figures for the file, a table, remarks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.bench.calibration import Steadiness
from blockflow.bench.compare.judgement import Change, Comparison
from blockflow.bench.grid import Grid, digits, with_bounds
from blockflow.bench.results import Figure

RATIO = "tree to base"
_NOTHING = "-"


def figures(found: Sequence[Comparison], titles: tuple[str, str], flaw: str = "") -> list[Figure]:
    """One per metric; its value is the ratio, 0 where there is none (``note`` says why).

    ``flaw`` is what makes the run less than whole; every figure carries it.
    """
    out = []
    for c in found:
        labels = {
            "metric": c.metric.text,
            "metric_unit": c.metric.unit,
            "base": c.base,
            "tree": c.tree,
            "base_revision": titles[0],
            "tree_revision": titles[1],
            "noise": c.noise,
            "warm_up_rounds": c.warm_up,
            "verdict": str(c.change) if c.ratio and not c.note else "none",
        }
        if c.note:
            labels["note"] = c.note
        if flaw:
            labels["flaw"] = flaw
        value, n = (c.ratio.value, c.ratio.n) if c.ratio else (0.0, 0)
        low, high = (c.ratio.low, c.ratio.high) if c.ratio else (None, None)
        figure = Figure(
            RATIO, c.metric.text, None, None, None, value, "x", n, None, None, low, high, labels
        )
        out.append(figure)
    return out


def grid(found: Sequence[Comparison], titles: tuple[str, str]) -> Grid:
    """One row per metric."""
    rows = []
    common = _common([c.metric.text for c in found])
    for c in found:
        ratio = with_bounds(c.ratio.value, c.ratio.low, c.ratio.high) if c.ratio else _NOTHING
        rows.append(
            (
                _shortened(c.metric.text, common),
                _NOTHING if c.base is None else f"{digits(c.base)} {c.metric.unit}",
                _NOTHING if c.tree is None else digits(c.tree),
                ratio,
                f"{c.noise:.1%}" if c.ratio else "",
                _NOTHING if c.note else c.change.word(c.metric.unit),
            )
        )
    heads = ("metric", "base", "tree", "x (95%)", "noise", "verdict")
    title = f"{titles[1]} beside {titles[0]}"
    if common:
        title += f": {', '.join(common)}"
    return Grid(title, heads, rows, frozenset({"metric", "verdict"}))


def _common(texts: Sequence[str]) -> list[str]:
    """What all metrics with labels have among them: it is said once, in the title."""
    labels = [text.split(", ")[2:] for text in texts]
    labels = [parts for parts in labels if parts]
    return [p for p in labels[0] if all(p in parts for parts in labels)] if labels else []


def _shortened(text: str, common: Sequence[str]) -> str:
    parts = text.split(", ")
    return ", ".join(parts[:2] + [p for p in parts[2:] if p not in common])


def remarks(found: Sequence[Comparison], steady: Steadiness) -> list[str]:
    """The sum of it, and how steady the machine was."""
    counts = {change: [c for c in found if c.change is change and not c.note] for change in Change}
    text = ", ".join(f"{len(counts[change])} {change}" for change in Change)
    silent = sum(1 for c in found if c.note)
    out = [text + (f", {silent} not compared" if silent else "")]
    cut = max((c.warm_up for c in found), default=0)
    if cut:
        out.append(f"warm-up: up to {cut} rounds were left out")
    common = _common([c.metric.text for c in found])
    notes: dict[str, list[str]] = {}
    for c in found:
        if c.note:
            notes.setdefault(c.note, []).append(_shortened(c.metric.text, common))
    for note, metrics in notes.items():
        which = "all metrics" if len(metrics) == len(found) else "; ".join(metrics)
        out.append(f"{note}: {which}")
    return [*out, steady.sentence()]
