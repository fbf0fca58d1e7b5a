"""Tables of the reasons: what blocks cost, what could be gained, where a split would pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blockflow.bench.batching import figures as f
from blockflow.bench.batching.grids import change, told
from blockflow.bench.batching.plan import LOOSE, REASONS, ZEROBATCH
from blockflow.bench.grid import Grid, Rows, digits, ms
from blockflow.bench.results import Figure


def _of(found: Iterable[Figure], *names: str) -> list[Figure]:
    return [g for g in found if g.name in names and g.labels.get("experiment") == REASONS]


def _by_rows(found: Iterable[Figure], name: str, title: str, show: Callable[[float], str]) -> Grid:
    """A line per block, a column per number of rows."""
    mine = _of(found, name)
    sizes = sorted({g.labels["rows"] for g in mine})
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for g in mine:
        lines.setdefault((g.labels["model"], g.mode), {})[g.labels["rows"]] = g.value
    rows = [
        (model, block, *(show(line[b]) if b in line else "" for b in sizes))
        for (model, block), line in lines.items()
    ]
    return Grid(title, ("model", "block", *map(str, sizes)), rows, frozenset({"model", "block"}))


def row_grid(found: Iterable[Figure]) -> Grid:
    """Milliseconds of a row by the rows of its batch."""
    return _by_rows(found, f.ROW, "Reasons: ms of a row, by the rows of its batch", digits)


def split_grid(found: Iterable[Figure]) -> Grid:
    """The time from a block to the end, relative to that of two halves."""
    title = "Reasons: whole batch to two halves, from this block on (splits from 1.00 on)"
    return _by_rows(found, f.SPLIT, title, lambda value: f"{value:.2f}")


def gain_grid(found: Iterable[Figure]) -> Grid:
    """Mean times in virtual time, beside ZeroBatch, the best policy and the bound."""
    figures = list(found)
    times = {(g.labels["model"], g.labels["load"], g.mode): g for g in _of(figures, f.SIMULATED)}
    tails = {
        (g.labels["model"], g.labels["load"], g.mode): g for g in _of(figures, f.SIMULATED_TAIL)
    }
    ratios = {(g.labels["model"], g.labels["load"], g.mode): g for g in _of(figures, f.TIME_RATIO)}
    rows = Rows()
    for (model, load, arm), time in times.items():
        ratio = ratios.get((model, load, arm))
        zero, tail = tails[model, load, ZEROBATCH], tails[model, load, arm]
        best, bound = (ratios.get((model, load, name)) for name in (f.BEST, f.POSSIBLE))
        rows.row(
            model,
            load,
            arm,
            ms(time.value),
            ms(tail.value),
            change(ratio.value) if ratio else "",
            change(tail.value / zero.value) if ratio else "",
            change(best.value) if best and ratio else "",
            change(bound.value) if bound and ratio else "",
            change(told(ratio)),
        )
    heads = ("model", "load", "policy", "mean ms", "p99 ms", "mean", "p99", "best", "none", "paper")
    left = frozenset({"model", "load", "policy"})
    return Grid("Reasons: simulated, beside ZeroBatch", heads, rows, left)


def peak_grid(found: Iterable[Figure]) -> Grid:
    """The highest rates in virtual time whose 99th percentile keeps the bound."""
    figures = list(found)
    ratios = {(g.labels["model"], g.mode): g for g in _of(figures, f.PEAK_RATIO)}
    rows = []
    for g in _of(figures, f.SIMULATED_PEAK):
        model = g.labels["model"]
        ratio = ratios.get((model, g.mode))
        beside = f"{ratio.value:.3f}" if ratio else ""
        rows.append((model, g.mode, digits(g.labels["bound_ms"]), digits(g.value), beside))
    heads = ("model", "policy", "bound ms", "rows/s", "x ZeroBatch")
    title = "Reasons: peak within the bound, simulated"
    return Grid(title, heads, rows, frozenset({"model", "policy"}))


def test_grid(found: Iterable[Figure]) -> Grid:
    """Tests of multi-sample requests by the gap between them."""
    figures = list(found)
    least = {(g.labels["gap"], g.labels["load"]): g for g in _of(figures, f.TEST_POSSIBLE)}
    all_of = _of(figures, f.TEST_RATIO)
    loose = {(g.labels["gap"], g.labels["load"]): g for g in all_of if g.mode == LOOSE}
    rows = Rows()
    for g in all_of:
        if g.mode == LOOSE:
            continue
        wide = loose.get((g.labels["gap"], g.labels["load"]))
        bound = least[g.labels["gap"], g.labels["load"]]
        rows.row(
            g.labels["load"],
            f"1-{g.labels['largest']}",
            digits(g.labels["gap"]),
            change(g.value),
            change(wide.value) if wide else "",
            change(bound.value),
            change(told(g)),
        )
    heads = ("data", "rows", "gap", "LBCI", LOOSE, "none", "paper")
    title = "Reasons: tests of multi-sample requests beside serial, simulated"
    return Grid(title, heads, sorted(rows, key=lambda r: float(r[2])), frozenset({"data"}))
