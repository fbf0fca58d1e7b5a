"""The demo's figures as tables for the document."""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.bench.demo.report import AIM_S, WHOLE_RUN
from blockflow.bench.grid import Grid, Rows, digits, ms
from blockflow.bench.reliability.promise import NOT_MEASURED
from blockflow.bench.results import Figure


def demo_task_grid(found: Sequence[Figure]) -> Grid:
    """One row per deployment and task."""
    by = {(f.name, f.mode): f for f in found}
    rows = Rows()
    for mode in dict.fromkeys(f.mode for f in found if f.name == "latency"):
        right, latency = by.get(("accuracy", mode)), by["latency", mode]
        rate = by.get(("throughput", mode))
        rows.row(
            *mode.split("/", 1),
            f"{right.value:.2f}" if right else "",
            ms(latency.p50_ms),
            ms(latency.p99_ms),
            digits(rate.value) if rate else "",
            str(latency.n),
        )
    heads = ("deployment", "task", "right, %", "p50 ms", "p99 ms", "requests/s", "n")
    return Grid("The demo's tasks", heads, rows, frozenset(heads[:2]))


def demo_memory_grid(found: Sequence[Figure]) -> Grid:
    """One row per deployment, in MiB."""
    by = {(f.name, f.mode): f for f in found}
    rows = []
    for mode in dict.fromkeys(f.mode for f in found if f.name == "state"):
        parts = [by.get((name, mode)) for name in ("state", "uss", "pss")]
        sizes = [digits(f.value) if f else "" for f in parts]
        rows.append((mode, str(by["state", mode].n), *sizes))
    heads = ("deployment", "workers", "weights MiB", "private MiB", "PSS MiB")
    return Grid("The demo's memory", heads, rows, frozenset({"deployment"}))


def demo_time_grid(found: Sequence[Figure]) -> Grid:
    """How long the whole run took, in seconds."""
    f = next((f for f in found if f.name == WHOLE_RUN), None)
    taken, verdict = (digits(f.value), str(f.labels["verdict"])) if f else ("", NOT_MEASURED)
    goal = AIM_S if f is None else f.labels["goal"]
    heads = ("whole run, s", "goal", "verdict")
    return Grid(
        "The demo's time", heads, [(taken, f"<= {goal:g}", verdict)], frozenset({"verdict"})
    )
