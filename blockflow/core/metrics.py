"""Measures kept by every process: a mergeable histogram and the KPI records built from it.

Durations are nanoseconds of the monotonic clock. Names of KPIs are fixed here, once, for the CLI,
REST, files and Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_SUB_BITS = 4
_SUB = 1 << _SUB_BITS


class Histogram:
    """Log-linear histogram of non-negative integers, relative error below 1/16 (as HdrHistogram).

    ``record`` costs well under a microsecond; memory is bounded by the buckets in use.
    """

    __slots__ = ("count", "counts", "maximum", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.count = 0
        self.total = 0
        self.maximum = 0

    @staticmethod
    def bucket(value: int) -> int:
        if value < _SUB:
            return value
        shift = value.bit_length() - 1 - _SUB_BITS
        return ((shift + 1) << _SUB_BITS) + ((value >> shift) & (_SUB - 1))

    @staticmethod
    def bounds(index: int) -> tuple[int, int]:
        """Values lo <= v < hi that fall into a bucket."""
        if index < _SUB:
            return index, index + 1
        shift = (index >> _SUB_BITS) - 1
        lo = ((index & (_SUB - 1)) | _SUB) << shift
        return lo, lo + (1 << shift)

    def record(self, value: int) -> None:
        value = max(0, value)
        i = self.bucket(value)
        self.counts[i] = self.counts.get(i, 0) + 1
        self.count += 1
        self.total += value
        self.maximum = max(self.maximum, value)

    def merge(self, other: Histogram) -> None:
        for i, n in other.counts.items():
            self.counts[i] = self.counts.get(i, 0) + n
        self.count += other.count
        self.total += other.total
        self.maximum = max(self.maximum, other.maximum)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, p: float) -> float:
        """Value at percentile ``p`` (0..100), the middle of its bucket; 0.0 when empty."""
        if not self.count:
            return 0.0
        rank = max(1, -(-self.count * p // 100))
        seen = 0
        for i in sorted(self.counts):
            seen += self.counts[i]
            if seen >= rank:
                lo, hi = self.bounds(i)
                return min((lo + hi - 1) / 2, float(self.maximum))
        return float(self.maximum)

    def summary(self) -> dict[str, float]:
        """count, and mean/p50/p90/p99/max/sum in milliseconds (for values in nanoseconds)."""
        return {
            "count": self.count,
            "mean_ms": self.mean / 1e6,
            "p50_ms": self.percentile(50) / 1e6,
            "p90_ms": self.percentile(90) / 1e6,
            "p99_ms": self.percentile(99) / 1e6,
            "max_ms": self.maximum / 1e6,
            "sum_ms": self.total / 1e6,
        }


class RateMeter:
    """Events per second over a sliding window, from a monotonic ``now`` given by the caller."""

    __slots__ = ("_buckets", "_width_ns", "_window")

    def __init__(self, window_s: float = 5.0, buckets: int = 20) -> None:
        self._width_ns = int(window_s * 1e9 / buckets)
        self._window = buckets
        self._buckets: dict[int, int] = {}

    def add(self, n: int, now_ns: int) -> None:
        i = now_ns // self._width_ns
        self._buckets[i] = self._buckets.get(i, 0) + n
        if len(self._buckets) > 2 * self._window:
            self._prune(i)

    def rate(self, now_ns: int) -> float:
        """Over the whole window, also where nothing came for a part of it."""
        i = now_ns // self._width_ns
        self._prune(i)
        return self._over(now_ns, i - self._window + 1)

    def pace(self, now_ns: int) -> float:
        """Since the first event of the window: where a flow has just begun, what it will be. Of
        events that come seldom it makes many."""
        i = now_ns // self._width_ns
        self._prune(i)
        return self._over(now_ns, min(self._buckets, default=i))

    def _over(self, now_ns: int, first: int) -> float:
        covered = max(now_ns - first * self._width_ns, self._width_ns)
        return sum(self._buckets.values()) * 1e9 / covered

    def _prune(self, current: int) -> None:
        for k in [k for k in self._buckets if k <= current - self._window]:
            del self._buckets[k]


@dataclass(frozen=True, slots=True)
class StageKpi:
    """One stage's figures since start; rates over the last seconds.

    ``lam`` is the arrival rate (rows/s), ``mu`` the service rate while computing (rows/s), ``rho``
    =
    lam/mu the load (thesis, eq. 4.2). ``wait``, ``overhead`` and ``compute`` are
    :meth:`Histogram.summary` maps. ``device`` is such a map for the time on a GPU, where work goes
    on when the host has ordered it (``compute``); empty on the CPU. Of the ``elements_in`` that the
    engine was given ``elements_padded`` only made inputs equally long. ``copies_in`` and
    ``copies_out`` count whole tensors that were copied (docs/engines.md), ``bytes_copied_in`` those
    of the inputs, ``bytes_out`` what was published. ``engine`` and ``precision`` are what really
    runs.
    """

    stage: int
    block: str
    queue: int
    queue_rows: int
    requests: int
    rows: int
    batches: int
    failures: int
    expired: int
    lam: float
    mu: float
    rho: float
    rows_per_s: float
    mean_batch_rows: float
    wait: Mapping[str, float] = field(default_factory=dict)
    overhead: Mapping[str, float] = field(default_factory=dict)
    compute: Mapping[str, float] = field(default_factory=dict)
    device: Mapping[str, float] = field(default_factory=dict)
    bytes_out: int = 0
    copies_out: int = 0
    bytes_copied_in: int = 0
    copies_in: int = 0
    elements_in: int = 0
    elements_padded: int = 0
    engine: str = ""
    precision: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ProcessKpi:
    """One process's resources. Memory in bytes; ``cpu_percent`` of one core.

    ``uss`` is private memory, ``pss`` its proportional share, ``arena_used`` of ``arena_bytes`` in
    slots. GPU fields are None where there is none; all but ``gpu_memory`` are the whole device's.
    ``gpu_mj_per_row`` is its energy for each row that this process computed.
    ``h2d``, ``d2h`` and ``d2d`` count copies from host to device, back, and from another device.
    """

    pid: int
    cpu_percent: float
    cpu_mhz: float
    rss: int
    pss: int
    uss: int
    threads: int
    fds: int
    arena_bytes: int = 0
    arena_used: int = 0
    slots: int = 0
    slots_used: int = 0
    gpu_util_percent: float | None = None
    gpu_memory: int | None = None
    gpu_clock_mhz: float | None = None
    gpu_temperature_c: float | None = None
    gpu_memory_clock_mhz: float | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None
    gpu_mj_per_row: float | None = None
    torch_allocated: int | None = None
    torch_reserved: int | None = None
    h2d_copies: int = 0
    h2d_bytes: int = 0
    d2h_copies: int = 0
    d2h_bytes: int = 0
    d2d_copies: int = 0
    d2d_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
