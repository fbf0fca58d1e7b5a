"""Report: tables, figures and the picture of a chaos run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import isfinite
from typing import Any

from rich.table import Table

from blockflow.bench.canvas import new_page
from blockflow.bench.chaos.faults import POISONED
from blockflow.bench.chaos.findings import Findings
from blockflow.bench.chaos.growth import growths
from blockflow.bench.chaos.ledger import OK
from blockflow.bench.chaos.watch import MemorySample
from blockflow.bench.grid import Grid, Rows
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.statistics import Interval, percentile

REQUESTS, VIOLATIONS, LEFT = "requests", "violations", "left behind"
ANSWERED = "answered with their result"
FAULTS, HITS, RECOVERY, READY = "faults", "processes hit", "recovery", "ready again"
GROWTH, TIMELINE = "growth", "timeline"
LATE = "later than the deadline allows"
AS_WANTED = "ended as it should"
"""Requests that cannot be answered, or whose clients have changed their minds."""
_STEPS = 240


MANAGER_BACK = "manager killed: taken over"
"""Whose recovery is not that of tasks: they were served all the time (:data:`SERVED`)."""
SERVED, AWAY, UNSERVED = "served without a manager", "requests", "gaps without an answer"
ABANDONED = "no new manager"


def recoveries(found: Findings) -> dict[str, list[float]]:
    """Kind of fault -> seconds until each task that it hit was answered again."""
    out: dict[str, list[float]] = defaultdict(list)
    recovery_s = found.ledger.recoveries()
    for fault in found.faults:
        if fault.kind == POISONED:  # it kills some time after it was sent
            continue
        for task in fault.tasks:
            seconds = recovery_s(task, fault.at_s)
            if seconds is not None:
                out[fault.kind].append(seconds)
    if taken := [t.took_s for t in found.takeovers if isfinite(t.took_s)]:
        out[MANAGER_BACK] = taken
    return dict(out)


def figures(found: Findings) -> list[Figure]:
    """Everything of a run, its course included (:data:`TIMELINE`)."""
    ledger = found.ledger
    outcomes = ledger.outcomes()
    n = ledger.sent_count

    def count(name: str, mode: str, value: float, unit: str, of: int = n) -> Figure:
        return Figure.of(name, mode, float(value), unit, of)

    out = [
        count(REQUESTS, "all", n, "requests"),
        *(count(REQUESTS, o, many, "requests") for o, many in sorted(outcomes.items())),
        count(REQUESTS, "never ended", ledger.missing, "requests"),
        count(REQUESTS, "ended twice", ledger.doubled, "requests"),
        count(REQUESTS, "no reply from a living dispatcher", found.lost, "requests"),
        count(ANSWERED, "all", ledger.answered, "1"),
        count(VIOLATIONS, "all", len(found.violations()), "1"),
        count(LEFT, "processes", len(found.survivors), "processes"),
        count(LEFT, "files", len(found.files), "files"),
        count("lag", "worst", 1e3 * found.lag.worst_s, "ms"),
        count(LATE, "all", len(ledger.late(found.grace_s)), "requests"),
        count(LATE, "beyond the machine's lag", len(found.late), "requests"),
        *(count(AS_WANTED, what, many, "requests") for what, many in sorted(ledger.odd().items())),
    ]
    worst = ledger.worst_s()
    if worst is not None:
        out.append(count("after the deadline", "worst", 1e3 * worst, "ms"))
    kinds = Counter(f.kind for f in found.faults)
    out += [count(FAULTS, kind, many, "faults", many) for kind, many in sorted(kinds.items())]
    done = Counter(f.kind for f in found.faults if f.tasks)
    out += [count(HITS, kind, many, "faults", many) for kind, many in sorted(done.items())]
    for name, times in ((RECOVERY, recoveries(found)), (READY, found.ready_again)):
        for kind, seconds in sorted(times.items()):
            most = {"max": round(1e3 * max(seconds), 3)}
            out.append(latency_figure(name, kind, None, [1e3 * s for s in seconds], most))
    out += _without_manager(found)
    return [*out, *_memory_figures(found.memory), *_timeline(found)]


def _without_manager(found: Findings) -> list[Figure]:
    """What clients got between a Manager's death and its successor, and who had none."""
    gaps = [t for t in found.takeovers if isfinite(t.took_s)]
    if not found.takeovers:
        return []
    pairs = [found.ledger.served((t.at_s, t.at_s + t.took_s)) for t in gaps]
    served, asked = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0)
    empty = sum(bool(of) and not answers for answers, of in pairs)
    many = len(found.takeovers)
    return [
        Figure.of(SERVED, AWAY, float(served), "requests", asked),
        Figure.of(SERVED, UNSERVED, float(empty), "1", many),
        Figure.of(SERVED, ABANDONED, float(many - len(gaps)), "1", many),
    ]


def _memory_figures(memory: Sequence[MemorySample]) -> list[Figure]:
    """Medians of the first and the last quarter, and what grows along the whole run."""
    if not memory:
        return []
    many = len(memory)
    quarter = max(1, many // 4)
    first, last = memory[:quarter], memory[-quarter:]

    def median(mode: str, name: str, values: Sequence[float], unit: str) -> Figure:
        return Figure.of(name, mode, percentile(values, 50), unit, many)

    out = [
        median("first quarter", "RSS", [s.rss / 2**20 for s in first], "MiB"),
        median("last quarter", "RSS", [s.rss / 2**20 for s in last], "MiB"),
        median("last quarter", "shared memory", [s.run_dir / 2**20 for s in last], "MiB"),
        median("last quarter", "descriptors", [s.descriptors for s in last], "1"),
    ]
    for g in growths(memory):
        labels = {
            "median": round(g.median, 1),
            "per_hour": round(g.per_hour, 2),
            "seconds": round(g.seconds),
            "tolerance": round(g.tolerance, 1),
            "grows": g.grows,
        }
        found = Interval(g.value, g.low, g.high, many)
        out.append(interval_figure(GROWTH, g.name, None, found, g.unit, labels))
    return out


def _timeline(found: Findings) -> list[Figure]:
    """The run in steps: answers per second, with what else there was in the labels."""
    ended = found.ledger.ended
    length = max((e.done_s for e in ended), default=0.0)
    step = max(1.0, length / _STEPS)
    good: Counter[int] = Counter(int(e.done_s / step) for e in ended if e.outcome == OK)
    bad: Counter[int] = Counter(int(e.done_s / step) for e in ended if e.outcome != OK)
    hits: Counter[int] = Counter(int(f.at_s / step) for f in found.faults if f.tasks)
    samples = {int(s.at_s / step): s for s in found.memory}
    out = []
    for i in range(int(length / step)):  # the last step may be a short one
        labels: dict[str, Any] = {"at_s": round(i * step, 1), "failed": round(bad[i] / step, 2)}
        if hits[i]:
            labels["faults"] = hits[i]
        if sample := samples.get(i):
            labels["rss"] = round(sample.rss / 2**20, 1)
            labels["shared"] = round(sample.run_dir / 2**20, 2)
        rate = good[i] / step
        out.append(Figure.of(TIMELINE, "all", rate, "1/s", good[i], labels))
    return out


def outcome_table(found: Findings) -> Table:
    """Outcomes per task."""
    tasks = sorted({e.task for e in found.ledger.ended})
    rows = Rows()
    for outcome, count in found.ledger.outcomes().most_common():
        per = [
            sum(e.task == task and e.outcome == outcome for e in found.ledger.ended)
            for task in tasks
        ]
        rows.row(outcome, *map(str, per), str(count))
    rows.row("never ended", *("" for _ in tasks), str(found.ledger.missing))
    title, heads = "requests, by the clients' ledger", ("outcome", *tasks, "all")
    return Grid(title, heads, rows, frozenset({"outcome"})).rich()


def fault_table(found: Findings) -> Table:
    """Faults by kind and how soon the tasks that they hit were answered again."""
    rows = Rows()
    again = recoveries(found)
    for kind in sorted({f.kind for f in found.faults} | again.keys()):
        done = sum(f.kind == kind for f in found.faults)
        seconds, ready = again.get(kind, []), found.ready_again.get(kind, [])
        rows.row(
            kind,
            str(done or len(again[kind])),
            str(len(seconds)) if seconds and done else "",
            *_middle_and_worst(seconds),
            *_middle_and_worst(ready),
        )
    heads = ("fault", "count", "tasks hit", "recovery p50 s", "max s", "ready p50 s", "max s")
    return Grid("faults", heads, rows, frozenset({"fault"})).rich()


def _middle_and_worst(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{percentile(seconds, 50):.2f}", f"{max(seconds):.2f}") if seconds else ("", "")


def draw(found: Sequence[Figure]) -> Any:
    """Top: answers per second by outcome, faults as lines. Bottom: memory over the run."""
    page = new_page(10, 4.6, 100)
    top, bottom = page.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = [f for f in found if f.name == TIMELINE]
    at = [f.labels["at_s"] for f in steps]
    top.step(at, [f.value for f in steps], where="post", color="#17779b", label="answered")
    bad = [f.labels["failed"] for f in steps]
    top.step(at, bad, where="post", color="#e4572e", label="refused or failed")
    hit = [f.labels["at_s"] for f in steps if "faults" in f.labels]
    top.plot(hit, [0.0] * len(hit), "|", color="#5a4a78", label="a process is killed or stopped")
    top.set(ylabel="requests per second")
    top.set_ylim(bottom=0, top=1.3 * max((f.value for f in steps), default=1.0))  # for the legend
    top.legend(fontsize=7, frameon=False, ncols=3, loc="upper left")
    seen = [f for f in steps if "rss" in f.labels]
    for label, colour, name in (
        ("rss", "#17779b", "RSS, all"),
        ("shared", "#f2b134", "shared memory"),
    ):
        ys = [f.labels[label] for f in seen]
        bottom.plot([f.labels["at_s"] for f in seen], ys, color=colour, label=name)
    bottom.set(xlabel="seconds", ylabel="MiB")
    bottom.set_ylim(bottom=0)
    bottom.legend(fontsize=7, frameon=False, loc="lower left")
    return page


def violation_lines(violations: Sequence[str]) -> list[str]:
    """For the end of the output."""
    if not violations:
        return ["every request ended once, in time, and nothing was left behind"]
    return [f"BROKEN: {v}" for v in violations]
