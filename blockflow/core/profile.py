"""Profile: what a block's batches cost on one machine, measured.

``L[threads, rows]`` is the table that Packrat (section 3) optimises over. Durations are
milliseconds. How a table is measured and when it is stale: docs/profiling.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import inf, nextafter
from typing import Any

_LARGEST = nextafter(inf, 0)


@dataclass(frozen=True, slots=True)
class Point:
    """One cell of the table: a batch of ``rows`` on ``threads`` intra-op threads.

    Attributes:
        threads: intra-op threads of the one engine that ran.
        rows: rows of the batch.
        length: value of the variable dim (a sequence's length); None for blocks of fixed dims.
        runs: forwards behind the figures, warm-up not counted.
        mean_ms: mean time of a forward.
        p50_ms: median.
        p90_ms: 90th percentile.
        p99_ms: 99th percentile (the largest run where there are fewer than 100).
        low_ms: lower end of the 95% interval of the median.
        high_ms: its upper end.
        spread: LBCI's fluctuation ``r_b`` = mean |t - mean| / mean.
        outliers: runs far above the others; they are in all figures.
    """

    threads: int
    rows: int
    length: int | None
    runs: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    low_ms: float
    high_ms: float
    spread: float
    outliers: int

    def __post_init__(self) -> None:
        for name in ("threads", "rows", "runs"):
            _count(name, getattr(self, name), 1)
        _count("outliers", self.outliers, 0)
        if self.length is not None:
            _count("length", self.length, 1)
        for name in ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "low_ms", "high_ms", "spread"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is not a number: {value!r}")
            may_be_none = name not in ("mean_ms", "p50_ms")
            if not 0 <= value <= _LARGEST or not (value or may_be_none):
                raise ValueError(f"{name} is {value}")

    @property
    def key(self) -> tuple[int, int, int]:
        """(threads, length or 0, rows): what identifies a cell, and its order in a table."""
        return self.threads, self.length or 0, self.rows

    @property
    def row_ms(self) -> float:
        """Median time per row."""
        return self.p50_ms / self.rows

    @property
    def interval(self) -> float:
        """Half the width of the median's 95% interval, relative to the median."""
        return (self.high_ms - self.low_ms) / (2 * self.p50_ms)


@dataclass(frozen=True, slots=True)
class StageProfile:
    """The table of one block under one engine and precision on one machine.

    Attributes:
        block: its name in the repository.
        digest: sha256 of the artifact that was measured.
        engine: registered engine.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``int8``.
        machine: fingerprint of the machine and of the versions that ran.
        points: the cells, sorted by threads, length and rows; none is there twice.
    """

    block: str
    digest: str
    engine: str
    precision: str
    machine: str
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        for name in ("block", "digest", "engine", "precision", "machine"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is not text: {getattr(self, name)!r}")
        keys = [p.key for p in self.points]
        if keys != sorted(set(keys)):
            object.__setattr__(self, "points", tuple(sorted(self.points, key=lambda p: p.key)))
            if len(set(keys)) != len(keys):
                twice = next(k for k in keys if keys.count(k) > 1)
                raise ValueError(f"two points for (threads, length, rows) = {twice}")
        if len({p.length is None for p in self.points}) > 1:
            raise ValueError("some points have a length and some have none")

    def threads_measured(self) -> tuple[int, ...]:
        """Thread counts of the table, ascending."""
        return tuple(sorted({p.threads for p in self.points}))

    def only(self, threads: int) -> StageProfile:
        """The part of the table for one number of threads; no points where it was not measured."""
        return replace(self, points=tuple(p for p in self.points if p.threads == threads))

    def lengths_measured(self, threads: int = 1) -> tuple[int, ...]:
        """Lengths of the table, ascending; empty for a block of fixed dims."""
        found = {p.length for p in self.points if p.threads == threads}
        return tuple(sorted(n for n in found if n is not None))

    def rows_measured(self, threads: int = 1) -> tuple[int, ...]:
        """Batch sizes of the table (at any length), ascending."""
        return tuple(sorted({p.rows for p in self.points if p.threads == threads}))

    def r_max(self, threads: int = 1) -> float:
        """LBCI's ``r_max``: the largest fluctuation over all batch sizes.

        Raises:
            ValueError: ``threads`` was not measured.
        """
        self._of(threads)
        return max(p.spread for p in self.points if p.threads == threads)

    def ms(self, rows: int, threads: int = 1, length: int | None = None) -> float:
        """Median time of a forward of ``rows``, between measured points by straight lines.

        Above the largest measured rows the last slope goes on (it never falls); below the smallest
        the smallest's time stands, an upper bound. Along lengths likewise (in proportion beyond the
        only one that was measured); without a length the longest measured one counts, and a block
        of fixed dims has none.

        Raises:
            ValueError: ``rows`` < 1, or ``threads`` was not measured.
        """
        if rows < 1:
            raise ValueError(f"rows is {rows}")
        lines = self._of(threads)
        times = [(n, interpolate(line, rows)) for n, line in lines.items()]
        if 0 in lines:
            return times[0][1]
        return interpolate(times, times[-1][0] if length is None else length)

    def _of(self, threads: int) -> dict[int, list[tuple[int, float]]]:
        """length (0: none) -> (rows, ms), both ascending."""
        out: dict[int, list[tuple[int, float]]] = {}
        for p in self.points:
            if p.threads == threads:
                out.setdefault(p.length or 0, []).append((p.rows, p.p50_ms))
        if not out:
            known = ", ".join(map(str, self.threads_measured())) or "none"
            what = "1 thread was" if threads == 1 else f"{threads} threads were"
            raise ValueError(f"{what} not measured for {self.block}; known: {known}")
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form."""
        return {
            "block": self.block,
            "digest": self.digest,
            "engine": self.engine,
            "precision": self.precision,
            "machine": self.machine,
            "points": [asdict(p) for p in self.points],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageProfile:
        """Inverse of :meth:`to_dict`. Raises ValueError on nonsense."""
        names = {f.name for f in fields(Point)}
        try:
            points = tuple(
                Point(**{k: v for k, v in dict(p).items() if k in names}) for p in data["points"]
            )
            head = {f.name: data[f.name] for f in fields(cls) if f.name != "points"}
            return cls(**head, points=points)
        except KeyError as e:
            raise ValueError(f"not a profile: it has no {e}") from e
        except (AttributeError, TypeError) as e:
            raise ValueError(f"not a profile: {e}") from e


def interpolate(line: Sequence[tuple[int, float]], x: int) -> float:
    """Value at ``x`` of a polyline of ``(x, y)`` sorted by ``x``, all positive.

    Left of it the first value; right of it the last slope, at least 0, goes on (one point alone:
    in proportion to ``x``).
    """
    i = bisect_right([at for at, _ in line], x)
    if i == 0:
        return line[0][1]
    x1, y1 = line[i - 1]
    if x == x1:
        return y1
    if i < len(line):
        x2, y2 = line[i]
        return y1 + (y2 - y1) * (x - x1) / (x2 - x1)
    if len(line) == 1:
        return y1 * x / x1
    x0, y0 = line[i - 2]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)


def _count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}")
