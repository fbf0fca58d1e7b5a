"""The tables that documents show of LoadGen's stored figures
(:mod:`~blockflow.bench.mlperf.figures`)."""

from __future__ import annotations

from collections.abc import Sequence

from blockflow.bench.grid import Grid, Rows, digits, ms, with_bounds
from blockflow.bench.mlperf.asked import bound_text
from blockflow.bench.mlperf.figures import (
    ACCURACY,
    BATCH,
    BLOCK,
    RUN,
    TARGET,
    VALIDATION,
    run_of,
)
from blockflow.bench.mlperf.pictures import PARTS
from blockflow.bench.numerals import beside, given
from blockflow.bench.results import Figure


def label_of(f: Figure) -> str:
    """The run that a figure is of, for a reader: ``server, official, p99 <= 50 ms``."""
    return ", ".join(filter(None, (_unbound(f), f.labels.get("asked"))))


def _unbound(f: Figure) -> str:
    """The same where the bounds have columns of their own."""
    scenario = f.mode if f.name == RUN else f.labels["scenario"]
    return ", ".join(filter(None, (scenario, f.labels.get("kind"))))


def run_grid(figures: Sequence[Figure]) -> Grid:
    """A row per run: the verdict, the scenario's figure and the latencies."""
    rows = []
    for f in (f for f in figures if f.name == RUN):
        bound, seen = f.labels["bound_ms"], f.labels["seen_ms"]
        asked = "" if bound is None else bound_text(f.labels["percentile"], bound)
        if asked and seen is not None:
            asked += f": {beside(seen, bound, ms(seen))}"
        if asked and f.labels.get("of"):
            asked += f" ({f.labels['of'].strip('()')})"
        value = f"{f.labels['metric']} {digits(f.value)} {f.unit}" if f.unit else ""
        if f.labels["verdict"] == "VALID":
            value += _above(f)
        kind = f.labels["kind"] + _broken(f)
        head = (f.mode, f.labels["tasks"], f.labels["verdict"], kind, asked, value)
        latencies = (ms(f.p50_ms), ms(f.p90_ms), ms(f.p99_ms))
        rows.append((*head, *latencies, str(f.n), str(f.labels["failed"])))
    text = ("scenario", "tasks", "verdict", "kind", "bound", "result")
    heads = (*text, "p50 ms", "p90 ms", "p99 ms", "samples", "failed")
    return Grid("LoadGen's verdicts", heads, rows, frozenset(text))


def _above(f: Figure) -> str:
    """How many runs a server rate was seen in, and what a search has found above it."""
    times = f.labels.get("least_of", 1)
    return (f" (least of {times} runs)" if times > 1 else "") + _limit(f)


def _limit(f: Figure) -> str:
    if f.labels["invalid_at"] is not None:
        seconds = f.labels.get("invalid_s")
        brief = "" if seconds is None else f" in a run of {given(seconds)} s"
        return f" (INVALID at {digits(f.labels['invalid_at'])}{brief})"
    if f.labels.get("bracketed") is False:
        return " (no INVALID rate was found: not the highest)"
    return ""


def target_grid(figures: Sequence[Figure]) -> Grid:
    """A row per run and task: its own bound, and what was seen of it."""
    rows = [
        (
            _unbound(f),
            f.mode,
            f.labels["verdict"] + _broken(f),
            f"{f.labels['percentile']:g}",
            "" if f.labels["bound_ms"] is None else given(f.labels["bound_ms"]),
            ms(f.value) if f.unit else "",
            str(f.n),
        )
        for f in figures
        if f.name == TARGET
    ]
    heads = ("scenario", "task", "verdict", "percentile", "bound ms", "seen ms", "samples")
    return Grid("Each task's target", heads, rows, frozenset(heads[:3]))


def _broken(f: Figure) -> str:
    """What a reader has to know of a figure whose call broke off."""
    return f" (partial: {f.labels['error']['code']})" if f.labels.get("partial") else ""


def accuracy_grid(figures: Sequence[Figure]) -> Grid:
    """A row per task: top-1 and top-5."""
    rows = [
        (
            f.mode + _broken(f),
            f"{f.value:.2f}",
            "" if f.labels["top5"] is None else f"{f.labels['top5']:.2f}",
            str(f.n),
        )
        for f in figures
        if f.name == ACCURACY
    ]
    heads = ("task", "top-1 %", "top-5 %", "rows")
    # Every scenario asks the same data for the same answers: one row tells it.
    return Grid("Accuracy", heads, list(dict.fromkeys(rows)), frozenset({"task"}))


def validation_grid(figures: Sequence[Figure]) -> Grid:
    """A row per validation test."""
    rows = Rows()
    for f in (f for f in figures if f.name == VALIDATION):
        told = f"{f.value:.1f}% the same"
        if f.unit == "x":
            told = f"{with_bounds(f.value, f.low, f.high)} as long"
        rows.row(
            f.mode,
            f.labels["scenario"],
            f.labels["outcome"] + _broken(f),
            told if f.n else "",
            str(f.n),
        )
    heads = ("test", "scenario", "outcome", "found", "n")
    return Grid("Validation tests", heads, rows, frozenset(heads[:-1]))


def block_grid(figures: Sequence[Figure]) -> Grid:
    """A row per scenario and block: where the time went, and how large the batches were."""
    sizes = {(*run_of(f), f.mode): f.value for f in figures if f.name == BATCH}
    rows = Rows()
    for f in (f for f in figures if f.name == BLOCK):
        size = sizes.get((*run_of(f), f.mode))
        parts = (ms(f.labels[part]) for part in PARTS)
        rows.row(
            label_of(f) + _broken(f),
            f.mode,
            *parts,
            "" if size is None else f"{size:.2f}",
            str(f.n),
        )
    heads = ("scenario", "block", *(f"{p} ms" for p in PARTS), "rows per batch", "requests")
    return Grid("Per block", heads, rows, frozenset(heads[:2]))
