"""Figure: one measured number, and the file and the table that benchmarks put their figures into.

Every benchmark writes one JSON object per figure and line, each with the machine that it was
measured on, so that figures of several runs and machines can be laid side by side.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.table import Table

import blockflow

VERSIONED = ("torch", "numpy", "pyzmq", "msgpack")
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form; ``p99_ms`` only where it was measured."""
        out = asdict(self)
        if self.p99_ms is None:
            del out["p99_ms"]
        return out


class ResultFile:
    """A JSON Lines file of one benchmark's figures: each run replaces the one before.

    Args:
        path: where to; missing folders are made.
        benchmark: its name, which every line carries.
    """

    def __init__(self, path: Path, benchmark: str) -> None:
        self.path = path
        self.benchmark = benchmark

    def write(self, figures: Iterable[Figure], machine: Mapping[str, Any] | None = None) -> int:
        """Write all figures and return their number. The file is whole or as it was before.

        ``machine`` is :func:`fingerprint` of this machine unless given.
        """
        facts = dict(fingerprint() if machine is None else machine)
        lines = [
            json.dumps({"benchmark": self.benchmark, **f.to_dict(), "machine": facts})
            for f in figures
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        os.replace(part, self.path)
        return len(lines)

    def read(self) -> list[dict[str, Any]]:
        """The written objects, in order."""
        text = self.path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line]


def fingerprint() -> dict[str, Any]:
    """What this machine is and which versions ran on it."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "blockflow": blockflow.__version__,
        **{name: version_of(name) for name in VERSIONED},
    }


def cpu_model() -> str:
    """The CPU's name as the kernel tells it; the architecture where it tells none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def version_of(package: str) -> str:
    """The installed version; '' where the package is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def percentile(samples: Sequence[float], p: float) -> float:
    """The sample at percentile ``p`` (0..100) by the nearest rank; samples need no order."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    rank = max(1, -(-len(ordered) * p // 100))
    return ordered[int(rank) - 1]


def latency_figure(name: str, mode: str, batch: int | None, samples_ms: Sequence[float]) -> Figure:
    """A duration with its percentiles; its value is the median."""
    p50 = percentile(samples_ms, 50)
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
    )


def figure_table(title: str, figures: Iterable[Figure]) -> Table:
    """All figures, one per row, for benchmarks that need no table of their own."""
    table = Table(title=title, title_justify="left")
    for head in ("figure", "mode"):
        table.add_column(head)
    for head in ("batch", "p50 ms", "p90 ms", "value", "unit", "n"):
        table.add_column(head, justify="left" if head == "unit" else "right")
    for f in figures:
        table.add_row(
            f.name,
            f.mode,
            "" if f.batch is None else str(f.batch),
            "" if f.p50_ms is None else f"{f.p50_ms:.3f}",
            "" if f.p90_ms is None else f"{f.p90_ms:.3f}",
            f"{f.value:.4g}",
            f.unit,
            str(f.n),
        )
    return table
