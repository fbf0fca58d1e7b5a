"""Tables of the stored figures of chaos runs, for documents. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.bench.chaos.report import FAULTS, GROWTH, HITS, READY, RECOVERY, REQUESTS
from blockflow.bench.grid import Grid, digits
from blockflow.bench.results import Figure


def outcome_grid(found: Sequence[Figure]) -> Grid:
    """How the requests ended."""
    rows = [
        (f.mode, f"{f.value:.0f}", f"{100 * f.value / f.n:.2f}" if f.n else "")
        for f in found
        if f.name == REQUESTS
    ]
    return Grid("requests", ("outcome", "requests", "%"), rows, frozenset({"outcome"}))


def fault_grid(found: Sequence[Figure]) -> Grid:
    """Faults by kind, until the tasks that were hit were answered again, until all was ready."""
    at = {(f.name, f.mode): f for f in found}
    # Only a run that kills one after the other waits until everything is ready.
    parts = {RECOVERY: "answered", READY: "ready"}
    told = [name for name in parts if any(f.name == name for f in found)]
    rows = []
    for f in found:
        if f.name != FAULTS:
            continue
        hit = at.get((HITS, f.mode))
        row = [f.mode, f"{f.value:.0f}", "" if hit is None else f"{hit.value:.0f}"]
        for name in told:
            row += _seconds(at.get((name, f.mode)))
        rows.append(tuple(row))
    heads = ["fault", "count", "hit a process"]
    for name in told:
        heads += [f"{parts[name]} again, {p} s" for p in ("p50", "p90", "p99")]
    return Grid("faults", tuple(heads), rows, frozenset({"fault"}))


def growth_grid(found: Sequence[Figure]) -> Grid:
    """Lines through memory and descriptors along the run."""
    rows = [
        (
            f.mode,
            f"{digits(f.labels['median'])} {f.unit}",
            f"{f.value:+.1f}",
            f"{f.low:+.1f} to {f.high:+.1f}",
            f"{f.labels['tolerance']:g}",
            "grows" if f.labels["grows"] else "",
        )
        for f in found
        if f.name == GROWTH
    ]
    heads = ("of", "median", "growth along the run", "95%", "allowed", "verdict")
    return Grid("growth", heads, rows, frozenset({"of", "verdict"}))


def _seconds(f: Figure | None) -> list[str]:
    """Median, 90th and 99th percentile."""
    values = (None, None, None) if f is None else (f.p50_ms, f.p90_ms, f.p99_ms)
    return ["" if v is None else f"{v / 1e3:.2f}" for v in values]
