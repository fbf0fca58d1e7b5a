"""Figure: one measured number, and the file and the table that benchmarks put their figures into.

Every benchmark writes one JSON object per figure and line, each with the machine that it was
measured on, so that figures of several runs and machines can be laid side by side.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

import blockflow
from blockflow.bench.git import COMMIT, DIRTY, revision_of
from blockflow.bench.grid import Grid
from blockflow.bench.statistics import Interval, median_interval, percentile
from blockflow.repository.machine import cpu_model, version_of

PARTIAL = "partial"
"""Label of what was measured before a run broke off."""

BETTER = "better"
"""Label of a figure whose unit does not say which way is better."""

LESS_IS_BETTER = {BETTER: "less"}
MORE_IS_BETTER = {BETTER: "more"}

VERSIONED = ("torch", "numpy", "pyzmq", "msgpack", "onnxruntime", "openvino")
"""Packages whose version may move a figure."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a benchmark.

    Attributes:
        name: what was measured ("latency", "accuracy").
        mode: which variant ("tensormq", "zeromq", a task, a deployment).
        batch: rows per request; None where that says nothing.
        p50_ms: median in milliseconds, for durations.
        p90_ms: 90th percentile in milliseconds, for durations.
        value: the number itself, in ``unit``.
        unit: "ms", "1/s", "MiB", "x", "%", ...
        n: samples behind it.
        p99_ms: 99th percentile in milliseconds, where there are samples enough.
        p10_ms: 10th percentile in milliseconds.
        low: lower bound of the value's 95% interval.
        high: upper bound.
        labels: what else tells this figure from its neighbours (engine, bytes, condition).
    """

    name: str
    mode: str
    batch: int | None
    p50_ms: float | None
    p90_ms: float | None
    value: float
    unit: str
    n: int
    p99_ms: float | None = None
    p10_ms: float | None = None
    low: float | None = None
    high: float | None = None
    labels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def interval(self) -> Interval:
        """For the judge; of a number without one, the number itself."""
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        return Interval(self.value, low, high, self.n)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form; what was not measured is left out (``p50_ms`` and ``p90_ms`` stay)."""
        out = asdict(self)
        for name in ("p99_ms", "p10_ms", "low", "high"):
            if out[name] is None:
                del out[name]
        if not self.labels:
            del out["labels"]
        return out

    @classmethod
    def of(
        cls,
        name: str,
        mode: str,
        value: float,
        unit: str,
        n: int = 1,
        labels: Mapping[str, Any] | None = None,
        batch: int | None = None,
    ) -> Figure:
        """A number that is counted or looked at once: no percentiles, and no interval."""
        return cls(name, mode, batch, None, None, value, unit, n, labels=labels or {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Figure:
        """Inverse of :meth:`to_dict`; fields that a figure does not have are passed over."""
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})


@dataclass(frozen=True, slots=True)
class Run:
    """Figures that one call has measured, with how, when and where.

    Attributes:
        figures: in the order in which they were written.
        machine: :func:`fingerprint` of then.
        date: ISO 8601; '' where it was not stored.
        command: what a person types to measure the same; '' where it was not stored.
    """

    figures: Sequence[Figure]
    machine: Mapping[str, Any]
    date: str = ""
    command: str = ""


class ResultFile:
    """A JSON Lines file of one benchmark's figures: each run replaces the one before.

    Where a call measures only a part, runs of the others are kept, with their own command and date.

    Args:
        path: where to; missing folders are made.
        benchmark: its name, which every line carries.
        command: what a person types to measure the same, for the documents.
    """

    def __init__(self, path: Path, benchmark: str, command: str = "") -> None:
        self.path = path
        self.benchmark = benchmark
        self.command = command

    def write(
        self,
        figures: Iterable[Figure],
        machine: Mapping[str, Any] | None = None,
        kept: Sequence[Run] = (),
    ) -> int:
        """Write all figures and return their number. The file is whole or as it was before.

        Args:
            figures: of this call.
            machine: :func:`fingerprint` of this machine unless given.
            kept: earlier runs (:func:`kept_runs`), which come first.
        """
        facts = fingerprint() if machine is None else machine
        return self.write_runs([*kept, Run(list(figures), facts, today(), self.command)])

    def write_runs(self, runs: Iterable[Run]) -> int:
        """As :meth:`write`, with whole runs."""
        lines: list[str] = []
        for run in runs:
            head: dict[str, Any] = {"benchmark": self.benchmark}
            if run.command:
                head["command"] = run.command
            if run.date:
                head["date"] = run.date
            lines += [
                json.dumps({**head, **f.to_dict(), "machine": dict(run.machine)})
                for f in run.figures
            ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        try:
            part.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            os.replace(part, self.path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        return len(lines)

    def read(self) -> list[dict[str, Any]]:
        """The written objects, in order."""
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line]

    def runs(self) -> list[Run]:
        """What was written, by run; none where there is no file."""
        if not self.path.exists():
            return []
        found: dict[str, tuple[list[Figure], dict[str, Any]]] = {}
        for line in self.read():
            head = {name: line.get(name) for name in ("command", "date", "machine")}
            figures, _ = found.setdefault(json.dumps(head, sort_keys=True), ([], head))
            figures.append(Figure.from_dict(line))
        return [
            Run(figures, head["machine"], head["date"] or "", head["command"] or "")
            for figures, head in found.values()
        ]


def kept_runs(
    runs: Iterable[Run], topic: Callable[[Figure], Hashable | None], again: Container[Hashable]
) -> list[Run]:
    """``runs`` without what is measured again.

    Args:
        topic: what a figure is about; None: about its run as a whole, whose last other figure
            takes it along.
        again: topics that are measured anew.
    """
    found = []
    for run in runs:
        left = [f for f in run.figures if (about := topic(f)) is None or about not in again]
        if any(topic(f) is not None for f in left):
            found.append(replace(run, figures=left))
    return found


def today() -> str:
    """By the wall clock: for people who ask how old a figure is."""
    return datetime.now(UTC).date().isoformat()


def make_command(target: str, arguments: Sequence[str]) -> str:
    """What a person types to run a benchmark with these arguments."""
    return (
        f"make {target} ARGS={shlex.quote(shlex.join(arguments))}"
        if arguments
        else f"make {target}"
    )


def fingerprint() -> dict[str, Any]:
    """What this machine is and which versions ran on it; from a git tree, of which commit."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],  # a distribution's own suffix says little
        "python": platform.python_version(),
        "blockflow": blockflow.__version__,
        **{name: version_of(name) for name in VERSIONED},
        **revision_of(),
    }


def same_machine(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two fingerprints are of one machine with the same versions, at whatever commit."""
    return _without_revision(a) == _without_revision(b)


def _without_revision(machine: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in machine.items() if name not in (COMMIT, DIRTY)}


def revision_text(machine: Mapping[str, Any]) -> str:
    """Which sources were measured, for a reader; '' where that was not stored."""
    if not machine.get(COMMIT):
        return ""
    return f"commit {machine[COMMIT]}{' with changes' if machine.get(DIRTY) else ''}"


def latency_figure(
    name: str,
    mode: str,
    batch: int | None,
    samples_ms: Sequence[float],
    labels: Mapping[str, Any] | None = None,
) -> Figure:
    """A duration with its percentiles; its value is the median, with the median's interval."""
    middle = median_interval(samples_ms)
    p50 = middle.value
    return Figure(
        name,
        mode,
        batch,
        p50,
        percentile(samples_ms, 90),
        p50,
        "ms",
        len(samples_ms),
        percentile(samples_ms, 99),
        percentile(samples_ms, 10),
        middle.low,
        middle.high,
        labels or {},
    )


def bursts_figure(
    name: str, mode: str, bursts: Sequence[Sequence[float]], labels: Mapping[str, Any]
) -> Figure:
    """The median of the bursts' medians, in milliseconds; the percentiles are of all samples.

    Those of a burst see the same moment of the machine: only bursts are repeats, and ``n`` counts
    them.
    """
    every = latency_figure(name, mode, None, [ms for burst in bursts for ms in burst], labels)
    found = median_interval([percentile(burst, 50) for burst in bursts])
    return replace(every, value=found.value, low=found.low, high=found.high, n=found.n)


def interval_figure(
    name: str,
    mode: str,
    batch: int | None,
    found: Interval | Sequence[float],
    unit: str,
    labels: Mapping[str, Any] | None = None,
) -> Figure:
    """A ratio, a rate or another number with its interval; of samples it is their median."""
    if not isinstance(found, Interval):
        found = median_interval(found)
    made = Figure.of(name, mode, found.value, unit, found.n, labels, batch)
    return replace(made, low=found.low, high=found.high)


def figure_table(title: str, figures: Iterable[Figure]) -> Table:
    """All figures, one per row, for benchmarks that need no table of their own; what none of them
    has gets no column."""
    rows = [
        (
            f.name,
            f.mode,
            "" if f.batch is None else str(f.batch),
            "" if f.p50_ms is None else f"{f.p50_ms:.3f}",
            "" if f.p90_ms is None else f"{f.p90_ms:.3f}",
            f"{f.value:.4g}",
            f.unit,
            str(f.n),
        )
        for f in figures
    ]
    heads = ("figure", "mode", "batch", "p50 ms", "p90 ms", "value", "unit", "n")
    shown = [i for i in range(len(heads)) if i < 2 or any(row[i] for row in rows)]
    columns = [tuple(row[i] for i in shown) for row in (heads, *rows)]
    return Grid(title, columns[0], columns[1:], frozenset({"figure", "mode", "unit"})).rich()
