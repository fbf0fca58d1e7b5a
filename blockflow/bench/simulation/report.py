"""Report: a comparison as tables for a terminal and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from blockflow.bench.canvas import new_page, save_page
from blockflow.bench.simulation.comparison import Entry
from blockflow.bench.statistics import Interval

_SHOWN = 8
"""Batch sizes per line, the most common ones."""


def legend(entries: Sequence[Entry]) -> list[str]:
    """The policies in full, by the number that the tables name them by."""
    names = {e.number: e.policy for e in entries}
    return [f"{number}. {name}".replace("[", r"\[") for number, name in names.items()]


def tables(entries: Sequence[Entry], bound_ms: float) -> list[Table]:
    """One table per rate, one line per policy."""
    return [
        _table([e for e in entries if e.rate == rate], bound_ms)
        for rate in dict.fromkeys(e.rate for e in entries)
    ]


def _table(entries: Sequence[Entry], bound_ms: float) -> Table:
    title = _load(entries[0])
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    out.add_column("policy", no_wrap=True)
    for head in ("mean ms", "p50", "p99", "to first", "served\n1/s", "rows/\nbatch"):
        out.add_column(head, justify="right", no_wrap=True)
    out.add_column(f"over\n{bound_ms:g} ms", justify="right", no_wrap=True)
    out.add_column("lost", justify="right", no_wrap=True)
    for entry in entries:
        lost = entry.of(lambda o: (o.expired + o.rejected) / o.offered if o.offered else 0.0)
        out.add_row(
            _short(entry),
            _with_bounds(entry.latency("mean")),
            _number(entry.latency("p50")),
            _number(entry.latency("p99")),
            _with_bounds(entry.versus),
            _number(entry.of(lambda o: o.throughput)),
            _number(entry.of(lambda o: o.rows_per_batch)),
            _percent(entry.of(lambda o: o.over)),
            _percent(lost),
        )
    return out


def task_table(entries: Sequence[Entry]) -> Table:
    """How each task fares; of interest where there are several."""
    out = Table(title="by task", title_justify="left", box=SIMPLE_HEAD)
    for head in ("load", "policy", "task"):
        out.add_column(head, overflow="fold")
    for head in ("offered", "served", "mean ms", "p99 ms"):
        out.add_column(head, justify="right")
    for entry in entries:
        for name in entry.outcomes[0].tasks:
            task = entry.task(name)
            out.add_row(
                _load(entry),
                _short(entry),
                name,
                str(task.offered),
                _percent(task.served),
                _number(task.mean_ms),
                _number(task.p99_ms),
            )
    return out


def batch_table(entries: Sequence[Entry]) -> Table:
    """How large the batches were, per block: the share of the batches by their rows."""
    out = Table(title="batches by rows", title_justify="left", box=SIMPLE_HEAD)
    for head in ("load", "policy", "block", "rows: share of the batches"):
        out.add_column(head, overflow="fold")
    for entry in entries:
        for block, sizes in entry.batches.items():
            count = sum(sizes.values())
            common = sorted(sizes, key=lambda r: -sizes[r])[:_SHOWN]
            text = "  ".join(f"{r}: {100 * sizes[r] / count:.0f}%" for r in sorted(common))
            out.add_row(_load(entry), _short(entry), block, text)
    return out


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
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
    latency.legend(fontsize=8)
    page.suptitle(title)
    save_page(page, path)


def _line(ax: Any, points: Sequence[tuple[float, Interval]], label: str) -> None:
    xs = [x for x, _ in points]
    (line,) = ax.plot(xs, [p.value for _, p in points], marker="o", markersize=3, label=label)
    lows, highs = [p.low for _, p in points], [p.high for _, p in points]
    ax.fill_between(xs, lows, highs, alpha=0.2, color=line.get_color())


def _load(entry: Entry) -> str:
    return f"load {entry.load:.2f}: {entry.rate:.4g}/s" if entry.rate else "its own rate"


def _short(entry: Entry) -> str:
    return f"{entry.number}. {entry.policy.partition(':')[0]}"


def _number(found: Interval | None) -> str:
    return "-" if found is None else _digits(found.value)


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:.{max(0, 2 - _exponent(value))}f}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2]) if value else 0


def _with_bounds(found: Interval | None) -> str:
    if found is None:
        return "-"
    return f"{_digits(found.value)}\n{_digits(found.low)}-{_digits(found.high)}"


def _percent(found: Interval | None) -> str:
    return "-" if found is None else f"{100 * found.value:.1f}%"
