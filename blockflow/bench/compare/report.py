"""What a comparison says: figures for the file, tables of such figures, remarks. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from blockflow.bench.calibration import Steadiness
from blockflow.bench.compare.judgement import Change, Comparison
from blockflow.bench.grid import Grid, Rows, digits, with_bounds
from blockflow.bench.results import Figure

RATIO = "tree to base"
_NOTHING = "-"
_NO_VERDICT = "none"
_FLAW_LETTERS = 120
"""Of a flaw in a table: it may end with the last words of a benchmark."""


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
            "verdict": _NO_VERDICT if c.note else str(c.change),
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


def verdict_grid(found: Sequence[Figure]) -> Grid:
    """One row per metric; what all metrics have among their labels is left to the title."""
    ratios = _ratios(found)
    common = _common([f.mode for f in ratios])
    rows = Rows()
    for f in ratios:
        unit = f.labels["metric_unit"]
        base, tree = f.labels["base"], f.labels["tree"]
        rows.row(
            _shortened(f.mode, common),
            _NOTHING if base is None else f"{digits(base)} {unit}",
            _NOTHING if tree is None else digits(tree),
            with_bounds(f.value, f.low, f.high) if f.n else _NOTHING,
            f"{f.labels['noise']:.1%}" if f.n else "",
            str(f.n) if f.n else "",
            _word(f),
        )
    heads = ("metric", "base", "tree", "x (95%)", "noise", "n", "verdict")
    title = " beside ".join(ratios[0].labels[k] for k in _REVISIONS) if ratios else "no metric"
    if common:
        title += f": {', '.join(common)}"
    return Grid(title, heads, rows, frozenset({"metric", "verdict"}))


_REVISIONS = ("tree_revision", "base_revision")


def revision_grid(found: Sequence[Figure]) -> Grid:
    """One line: what was compared, how it came out, and whether the run was whole."""
    ratios = _ratios(found)
    rows = []
    if ratios:
        verdicts = [f.labels["verdict"] for f in ratios]
        flaw = textwrap.shorten(str(ratios[0].labels.get("flaw", "")), _FLAW_LETTERS)
        row = (
            *(str(ratios[0].labels[k]) for k in _REVISIONS),
            ", ".join(_common([f.mode for f in ratios])),
            *(str(verdicts.count(v)) for v in (*map(str, Change), _NO_VERDICT)),
            # A bar would begin another cell.
            flaw.replace("|", "/"),
        )
        rows.append(row)
    texts = ("tree", "base", "of all metrics")
    heads = (*texts, *map(str, Change), "not compared", "flaw")
    return Grid("revisions", heads, rows, frozenset({*texts, "flaw"}))


def note_grid(found: Sequence[Figure]) -> Grid:
    """The metrics that have no verdict, and why."""
    ratios = _ratios(found)
    common = _common([f.mode for f in ratios])
    noted = [f for f in ratios if "note" in f.labels]
    rows = [(_shortened(f.mode, common), str(f.labels["note"])) for f in noted]
    heads = ("metric", "not compared")
    return Grid("not compared", heads, rows, frozenset(heads))


def _ratios(found: Sequence[Figure]) -> list[Figure]:
    """Without the machine's own calibration, which a result file holds too."""
    return [f for f in found if f.name == RATIO]


def _word(figure: Figure) -> str:
    verdict = figure.labels["verdict"]
    if verdict == _NO_VERDICT:
        return _NOTHING
    return Change(verdict).word(figure.labels["metric_unit"])


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
