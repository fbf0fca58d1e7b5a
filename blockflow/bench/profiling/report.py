"""Report: a profile as tables, as figures and as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from blockflow.bench.canvas import new_page, save_page
from blockflow.bench.grid import Grid, Rows, digits
from blockflow.bench.numerals import plain, significant
from blockflow.bench.profiling.choice import Judged
from blockflow.bench.profiling.plan import Effort
from blockflow.bench.profiling.run import Measured
from blockflow.bench.profiling.session import Outcome
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.statistics import Interval
from blockflow.core.fit import fit_curve
from blockflow.core.profile import Point

GOOD_FIT = 0.1
"""A curve that misses a measured point by more is called a bad fit."""


def profile_table(title: str, points: Sequence[Point], effort: Effort | None = None) -> Table:
    """One row per cell. With an ``effort``, cells that stayed less sure than it asked are marked:
    their time or their number of runs was over."""
    lengths = any(p.length is not None for p in points)
    keys = ["thr", *(["length"] if lengths else []), "rows"]
    heads = (*keys, "ms", "±", "ms/row", "p90", "spread", "runs", "out")
    rows = Rows()
    for p in points:
        rows.section(p.threads)
        unsure = effort is not None and p.interval > effort.confidence
        rows.row(
            str(p.threads),
            *([str(p.length)] if lengths else []),
            str(p.rows),
            significant(p.p50_ms),
            f"{digits(100 * p.interval)}%" + ("!" if unsure else ""),
            significant(p.row_ms),
            significant(p.p90_ms),
            f"{p.spread:.1%}",
            str(p.runs),
            str(p.outliers or ""),
        )
    return Grid(title, heads, rows, keys=len(keys)).rich()


def legend(points: Iterable[Point], effort: Effort) -> str:
    """What the marks mean, where there are any, and what helps: more time only those cells that
    had not made all the runs that a cell makes at most."""
    unsure = [p for p in points if p.interval > effort.confidence]
    if not unsure:
        return ""
    spent = sum(p.runs >= effort.max_runs for p in unsure)
    slow = len(unsure) - spent
    whys = []
    if slow:
        whys.append(f"{_cells(slow)} after {effort.seconds:g} s: --seconds gives more time")
    if spent:
        whys.append(
            f"{_cells(spent)} after {effort.max_runs} runs, the most there are: more time does not "
            "help, other work on the machine may be why"
        )
    return f"! less sure than ±{100 * effort.confidence:.4g}%: {'; '.join(whys)}"


def _cells(count: int) -> str:
    return f"{count} cell{'s' if count > 1 else ''}"


def fit_line(points: Sequence[Point], threads: int) -> str:
    """The curve fitted to the longest length, and how well; '' where there are too few points."""
    here = [p for p in points if p.threads == threads]
    longest = max((p.length for p in here if p.length is not None), default=None)
    here = [p for p in here if p.length == longest]
    if len(here) < 3:
        return ""
    fit = fit_curve([p.rows for p in here], [p.p50_ms for p in here])
    quality = "bad fit, " if fit.max_error > GOOD_FIT else ""
    at = (here[0].rows, here[-1].rows)
    text = ", ".join(f"{significant(fit.per_sample(b))} ms/row at {b}" for b in at)
    where = "" if longest is None else f", length {longest}"
    return (
        f"fit for {threads} thread{'s' if threads > 1 else ''}{where}: {text} "
        f"({quality}largest miss {fit.max_error:.1%}, R² {fit.r2:.2f})"
    )


def choice_table(judged: Sequence[Judged], tolerance: float) -> Table:
    """One row per measured candidate."""
    able = [j for j in judged if not j.outcome.reason]
    rows = Rows()
    for j in able:
        error = j.outcome.error
        rows.row(
            j.outcome.candidate.label,
            "" if j.row_ms is None else significant(j.row_ms),
            "" if j.ratio is None else f"{digits(j.ratio)}x",
            "" if error is None else f"{error:.2g}",
            j.verdict,
        )
    title = f"engines, tolerance {plain(tolerance)}"
    heads = ("engine", "ms/row", "time", "error", "verdict")
    table = Grid(title, heads, rows, frozenset({"engine", "verdict"})).rich()
    for j, row in zip(able, table.rows, strict=True):
        row.style = "bold" if j.chosen else None
    return table


def unmeasured_lines(outcomes: Iterable[Outcome]) -> list[str]:
    """Candidates that could not run, or not to the end, gathered by engine and reason."""
    labels: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        if o.reason:
            what = o.candidate.label.removeprefix(o.candidate.engine + " ")
            labels.setdefault((o.candidate.engine, o.reason), []).append(what)
    return [f"{engine} {', '.join(what)}: {reason}" for (engine, reason), what in labels.items()]


def figures(measured: Measured) -> list[Figure]:
    """One figure per candidate and cell, and the errors against the reference."""
    out = []
    for outcome in measured.outcomes:
        candidate = outcome.candidate
        base: dict[str, Any] = {
            "block": measured.name,
            "engine": candidate.engine,
            "precision": candidate.precision,
        }
        if candidate.extra:
            base["options"] = dict(candidate.extra)
        for cell in measured.cells:
            p = outcome.points.get(cell)
            if p is None:
                continue
            labels = {**base, "threads": p.threads, "spread": p.spread, "outliers": p.outliers}
            if p.length is not None:
                labels["length"] = p.length
            name = f"{measured.name}: {candidate.label}"
            found = Interval(p.p50_ms, p.low_ms, p.high_ms, p.runs)
            made = interval_figure("forward", name, p.rows, found, "ms", labels)
            out.append(replace(made, p50_ms=p.p50_ms, p90_ms=p.p90_ms, p99_ms=p.p99_ms))
        if outcome.error is not None:
            name = f"{measured.name}: {candidate.label}"
            out.append(Figure.of("error", name, outcome.error, "", 1, base))
    return out


def document(measured: Measured) -> dict[str, Any]:
    """Everything as one JSON object."""
    return {
        "blocks": [i.name for i in measured.infos],
        "candidates": [
            {
                "engine": o.candidate.engine,
                "precision": o.candidate.precision,
                "options": dict(o.candidate.extra),
                "reason": o.reason,
                "error": o.error,
                "reused": o.reused,
                "points": [asdict(o.points[c]) for c in measured.cells if c in o.points],
            }
            for o in measured.outcomes
        ],
        "chosen": next((j.outcome.candidate.label for j in measured.judged if j.chosen), None),
        "verdicts": {j.outcome.candidate.label: j.verdict for j in measured.judged},
        "machine": {"drift": measured.steadiness.drift, "spread": measured.steadiness.spread},
    }


def plot(results: Sequence[Measured], path: Path) -> None:
    """Time per row over rows, a panel per block, a line per candidate, threads and length."""
    page = new_page(6.0 * min(len(results), 2), 4.0 * ((len(results) + 1) // 2))
    for i, measured in enumerate(results):
        panel = page.add_subplot((len(results) + 1) // 2, min(len(results), 2), i + 1)
        for label, points in _lines(measured).items():
            points = sorted(points, key=lambda p: p.rows)
            low = [(p.p50_ms - p.low_ms) / p.rows for p in points]
            high = [(p.high_ms - p.p50_ms) / p.rows for p in points]
            panel.errorbar(
                [p.rows for p in points],
                [p.row_ms for p in points],
                yerr=[low, high],
                marker="o",
                markersize=3,
                linewidth=1,
                capsize=2,
                label=label,
            )
        panel.set(title=measured.name, xlabel="rows per batch", ylabel="ms per row")
        rows = sorted({c.rows for c in measured.cells})
        panel.set_xscale("log", base=2)
        panel.set_xticks(rows, [str(r) for r in rows])
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    save_page(page, path)


def _lines(measured: Measured) -> dict[str, list[Point]]:
    out: dict[str, list[Point]] = {}
    for outcome in measured.outcomes:
        for cell in measured.cells:
            p = outcome.points.get(cell)
            if p is not None:
                length = "" if p.length is None else f", length {p.length}"
                label = f"{outcome.candidate.label}, {p.threads} thr.{length}"
                out.setdefault(label, []).append(p)
    return out
