"""Report: a comparison as tables for a terminal and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockflow.bench.canvas import new_page, save_page
from blockflow.bench.grid import Grid, Rows, digits
from blockflow.bench.numerals import plain, significant
from blockflow.bench.simulation.comparison import Entry
from blockflow.bench.statistics import MIN_PAIRS, Interval

_SHOWN = 8
"""Batch sizes per line, the most common ones."""


def legend(entries: Sequence[Entry]) -> list[str]:
    """The policies in full, by the number that the tables name them by; and why some figures have
    no interval."""
    names = {e.number: e.policy for e in entries}
    lines = [f"{number}. {name}" for number, name in names.items()]
    shown = [found for e in entries for found in (e.latency("mean"), e.versus) if found is not None]
    if any(found.n < MIN_PAIRS for found in shown):
        lines.append(
            f"too few seeds for a 95% interval: it takes {MIN_PAIRS} with results (--seeds)"
        )
    return lines


def tables(entries: Sequence[Entry], bound_ms: float) -> list[Grid]:
    """One table per rate, one line per policy."""
    heads = (
        *("policy", "mean ms", "p50", "p99", "to first", "served\n1/s", "rows/\nbatch"),
        f"over\n{plain(bound_ms)} ms",
        "lost",
    )
    out = []
    for title, members in _by_rate(entries):
        rows = [
            (
                _short(entry),
                _with_bounds(entry.latency("mean")),
                _number(entry.latency("p50")),
                _number(entry.latency("p99")),
                _with_bounds(entry.versus),
                _number(entry.of(lambda o: o.throughput)),
                _number(entry.of(lambda o: o.rows_per_batch)),
                _percent(entry.share(lambda o: o.over)),
                _percent(entry.share(lambda o: (o.expired + o.rejected) / o.offered)),
            )
            for entry in members
        ]
        out.append(Grid(title, heads, rows, frozenset({"policy"})))
    return out


def task_tables(entries: Sequence[Entry]) -> list[Grid]:
    """How each task fares, a table per rate; of interest where there are several."""
    heads = ("policy", "task", "offered", "served", "mean ms", "p99 ms")
    out = []
    for title, members in _by_rate(entries):
        rows = Rows()
        for entry in members:
            for name in entry.outcomes[0].tasks:
                task = entry.task(name)
                rows.row(
                    _short(entry),
                    name,
                    str(task.offered),
                    _percent(task.served),
                    _number(task.mean_ms),
                    _number(task.p99_ms),
                )
        out.append(Grid(f"by task, {title}", heads, rows, frozenset({"policy", "task"})))
    return out


def batch_tables(entries: Sequence[Entry]) -> list[Grid]:
    """How large the batches were, per block: the share of the batches by their rows."""
    heads = ("policy", "block", "rows: share of the batches")
    out = []
    for title, members in _by_rate(entries):
        rows = []
        for entry in members:
            for block, sizes in entry.batches.items():
                count = sum(sizes.values())
                common = sorted(sizes, key=lambda r: -sizes[r])[:_SHOWN]
                text = "  ".join(f"{r}: {100 * sizes[r] / count:.0f}%" for r in sorted(common))
                rows.append((_short(entry), block, text))
        out.append(Grid(f"batches by rows, {title}", heads, rows, frozenset(heads)))
    return out


def _by_rate(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """With what a table of each rate is called."""
    out: dict[float, list[Entry]] = {}
    for entry in entries:
        out.setdefault(entry.rate, []).append(entry)
    return [(_load(members[0]), members) for members in out.values()]


def plot(entries: Sequence[Entry], title: str, path: Path) -> None:
    """Mean and p99 latency and throughput against the rate, one line per policy; PNG.

    Raises:
        SystemError_: MISSING_EXTRA when matplotlib is not installed.
    """
    page = new_page(13.0, 4.6)
    latency, tail, served = page.subplots(1, 3)
    for policy in dict.fromkeys(e.policy for e in entries):
        mine = [e for e in entries if e.policy == policy]
        for ax, which in ((latency, "mean"), (tail, "p99")):
            points = [(e.load, found) for e in mine if (found := e.latency(which)) is not None]
            _line(ax, points, policy)
        _line(served, [(e.load, e.of(lambda o: o.throughput)) for e in mine], policy)
    for ax, name in ((latency, "mean latency, ms"), (tail, "p99 latency, ms")):
        if any(len(line.get_xdata()) for line in ax.lines):  # without a result there is no scale
            ax.set_yscale("log")
        ax.set_title(name)
    served.set_title("served, 1/s")
    for ax in (latency, tail, served):
        ax.set_xlabel("load (rate / capacity without batching)")
        ax.grid(alpha=0.3)
    latency.legend(fontsize=8)
    page.suptitle(title)
    save_page(page, path)


def _line(ax: Any, points: Sequence[tuple[float, Interval]], label: str) -> None:
    xs = [x for x, _ in points]
    (line,) = ax.plot(xs, [p.value for _, p in points], marker="o", markersize=3, label=label)
    lows, highs = [p.low for _, p in points], [p.high for _, p in points]
    known = [p.n >= MIN_PAIRS for _, p in points]
    ax.fill_between(xs, lows, highs, where=known, alpha=0.2, color=line.get_color())


def _load(entry: Entry) -> str:
    if not entry.rate:
        return "its own rate"
    load = f"{entry.load:.2f}" if entry.load >= 0.1 else digits(entry.load)
    return f"load {load}: {plain(entry.rate)}/s"


def _short(entry: Entry) -> str:
    return f"{entry.number}. {entry.policy.partition(':')[0]}"


def _number(found: Interval | None) -> str:
    return "-" if found is None else _digits(found.value)


def _digits(value: float) -> str:
    return significant(value, 3)


def _with_bounds(found: Interval | None) -> str:
    """With its interval below it, unless it comes from too few seeds to have one."""
    if found is None or found.n < MIN_PAIRS:
        return _number(found)
    return f"{_digits(found.value)}\n{_digits(found.low)}-{_digits(found.high)}"


def _percent(found: Interval | None) -> str:
    return "-" if found is None else f"{100 * found.value:.1f}%"
