"""Report: tables, figures and the picture of a chaos run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from rich.table import Table

from blockflow.bench.canvas import new_page
from blockflow.bench.chaos.faults import Injected
from blockflow.bench.chaos.ledger import OK, Ledger
from blockflow.bench.chaos.watch import MemorySample
from blockflow.bench.results import Figure
from blockflow.bench.statistics import percentile

GRACE_S = 0.1
"""A reply is due by the deadline and this (docs/reliability.md)."""


MANAGER_BACK = "manager killed: taken over"
"""Whose recovery is not that of tasks: they were served all the time."""


@dataclass(slots=True)
class Findings:
    """What a run has found.

    Attributes:
        ledger: the clients'.
        faults: in order.
        memory: samples over the run.
        survivors: processes that outlived the system.
        files: paths that it left behind.
        recovered: the system was ready again at the end.
        readopted: seconds until a new Manager had taken over, each time that one was killed.
        lag_s: how late this machine woke a waiting thread at worst: no reply can be judged closer.
    """

    ledger: Ledger
    faults: list[Injected] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    recovered: bool = True
    lag_s: float = 0.0
    readopted: list[float] = field(default_factory=list)

    def violations(self) -> list[str]:
        """The promises that were broken, in words; empty if none was."""
        ledger = self.ledger
        out = []
        if ledger.missing:
            out.append(f"{ledger.missing} requests never ended")
        if ledger.doubled:
            out.append(f"{ledger.doubled} requests ended twice")
        if late := ledger.late(GRACE_S + self.lag_s):
            out.append(f"{late} requests ended later than their deadline allows")
        out += [f"{n} requests ended with {o}" for o, n in sorted(ledger.unexplained().items())]
        if abandoned := sum(not isfinite(s) for s in self.readopted):
            out.append(f"{abandoned} times no new manager took over")
        if not self.recovered:
            out.append("the system was not ready again at the end")
        out += [f"left behind: process {p}" for p in self.survivors]
        out += [f"left behind: {f}" for f in self.files]
        return out


def recoveries(found: Findings) -> dict[str, list[float]]:
    """Kind of fault -> seconds until each task that it hit was answered again."""
    out: dict[str, list[float]] = defaultdict(list)
    for fault in found.faults:
        for task in fault.tasks:
            seconds = found.ledger.recovery_s(task, fault.at_s)
            if seconds is not None:
                out[fault.kind].append(seconds)
    if taken := [s for s in found.readopted if isfinite(s)]:
        out[MANAGER_BACK] = taken
    return dict(out)


def figures(found: Findings) -> list[Figure]:
    ledger = found.ledger
    outcomes = ledger.outcomes()
    n = ledger.sent_count
    out = [
        Figure("requests", "all", None, None, None, float(n), "requests", n),
        *(
            Figure("requests", outcome, None, None, None, float(count), "requests", n)
            for outcome, count in sorted(outcomes.items())
        ),
        Figure("requests", "never ended", None, None, None, float(ledger.missing), "requests", n),
        Figure("violations", "all", None, None, None, float(len(found.violations())), "1", n),
    ]
    counts: dict[str, int] = defaultdict(int)
    for fault in found.faults:
        counts[fault.kind] += 1
    out += [
        Figure("faults", kind, None, None, None, float(count), "faults", count)
        for kind, count in sorted(counts.items())
    ]
    for kind, seconds in sorted(recoveries(found).items()):
        ms = [1000 * s for s in seconds]
        p50, p90 = percentile(ms, 50), percentile(ms, 90)
        out.append(Figure("recovery", kind, None, p50, p90, p50, "ms", len(ms), percentile(ms, 99)))
    if found.memory:
        quarter = max(1, len(found.memory) // 4)
        first = percentile([s.rss / 2**20 for s in found.memory[:quarter]], 50)
        last = percentile([s.rss / 2**20 for s in found.memory[-quarter:]], 50)
        shm = percentile([s.run_dir / 2**20 for s in found.memory[-quarter:]], 50)
        fds = percentile([s.descriptors for s in found.memory[-quarter:]], 50)
        many = len(found.memory)
        out += [
            Figure("RSS", "first quarter", None, None, None, first, "MiB", many),
            Figure("RSS", "last quarter", None, None, None, last, "MiB", many),
            Figure("shared memory", "last quarter", None, None, None, shm, "MiB", many),
            Figure("descriptors", "last quarter", None, None, None, fds, "1", many),
        ]
    return out


def outcome_table(found: Findings) -> Table:
    """Outcomes per task."""
    table = Table(title="requests, by the clients' ledger", title_justify="left")
    table.add_column("outcome")
    tasks = sorted({e.task for e in found.ledger.ended})
    for task in (*tasks, "all"):
        table.add_column(task, justify="right")
    for outcome, count in found.ledger.outcomes().most_common():
        per = [
            sum(e.task == task and e.outcome == outcome for e in found.ledger.ended)
            for task in tasks
        ]
        table.add_row(outcome, *map(str, per), str(count))
    table.add_row("never ended", *("" for _ in tasks), str(found.ledger.missing))
    return table


def fault_table(found: Findings) -> Table:
    """Faults by kind and how soon the tasks that they hit were answered again."""
    table = Table(title="faults", title_justify="left")
    table.add_column("fault")
    for head in ("count", "tasks hit", "recovery p50 s", "max s"):
        table.add_column(head, justify="right")
    again = recoveries(found)
    for kind in sorted({f.kind for f in found.faults} | again.keys()):
        done = [f for f in found.faults if f.kind == kind]
        seconds = again.get(kind, [])
        table.add_row(
            kind,
            str(len(done) or len(seconds)),
            str(len(seconds)) if seconds and done else "",
            f"{percentile(seconds, 50):.2f}" if seconds else "",
            f"{max(seconds):.2f}" if seconds else "",
        )
    return table


def draw(found: Findings) -> Any:
    """Top: answers per second by outcome, faults as lines. Bottom: memory over the run.

    Raises:
        SystemError_: MISSING_EXTRA without matplotlib.
    """
    page = new_page(11, 5.5, 100)
    top, bottom = page.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    ended = found.ledger.ended
    length = int(max((e.done_s for e in ended), default=1.0)) + 1
    good, bad = [0] * length, [0] * length
    for e in ended:
        (good if e.outcome == OK else bad)[int(e.done_s)] += 1
    top.step(range(length), good, where="post", color="#17779b", label="answered")
    top.step(range(length), bad, where="post", color="#e4572e", label="refused or failed")
    colours = ("#5a4a78", "#6a994e", "#f2b134", "#7f7f7f", "#000000")
    kinds = sorted({f.kind for f in found.faults if f.tasks})
    for fault in found.faults:
        if fault.tasks:
            colour = colours[kinds.index(fault.kind) % len(colours)]
            top.axvline(fault.at_s, color=colour, linewidth=0.8, linestyle=":")
    for kind, colour in zip(kinds, colours, strict=False):
        top.plot([], [], color=colour, linestyle=":", label=kind)
    top.set(ylabel="requests per second")
    top.set_ylim(0, 1.35 * max(good))  # room for the legend
    top.legend(fontsize=7, frameon=False, ncols=4, loc="upper left")
    at = [s.at_s for s in found.memory]
    bottom.plot(at, [s.rss / 2**20 for s in found.memory], color="#17779b", label="RSS, all")
    bottom.plot(
        at, [s.run_dir / 2**20 for s in found.memory], color="#f2b134", label="shared memory"
    )
    bottom.set(xlabel="seconds", ylabel="MiB")
    bottom.set_ylim(bottom=0)
    bottom.legend(fontsize=7, frameon=False, loc="lower left")
    return page


def violation_lines(violations: Sequence[str]) -> list[str]:
    """For the end of the output."""
    if not violations:
        return ["every request ended once, in time, and nothing was left behind"]
    return [f"BROKEN: {v}" for v in violations]
