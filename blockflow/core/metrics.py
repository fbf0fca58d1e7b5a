"""Measures kept by every process: a mergeable histogram and the KPI records built from it.

Durations are nanoseconds of the monotonic clock. Names of KPIs are fixed here, once, for the CLI,
REST, files and Prometheus.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

_SUB_BITS = 4
_SUB = 1 << _SUB_BITS


class Histogram:
    """Log-linear histogram of non-negative integers, relative error below 1/16 (as HdrHistogram).

    ``record`` costs well under a microsecond; memory is bounded by the buckets in use.
    """

    __slots__ = ("count", "counts", "maximum", "total")

    def __init__(self) -> None:
        self.counts: defaultdict[int, int] = defaultdict(int)
        self.count = 0
        self.total = 0
        self.maximum = 0

    @staticmethod
    def bounds(index: int) -> tuple[int, int]:
        """Values lo <= v < hi that fall into a bucket."""
        if index < _SUB:
            return index, index + 1
        shift = (index >> _SUB_BITS) - 1
        lo = ((index & (_SUB - 1)) | _SUB) << shift
        return lo, lo + (1 << shift)

    def record(self, value: int) -> None:
        if value < 0:
            value = 0
        index = value
        if value >= _SUB:
            shift = value.bit_length() - 1 - _SUB_BITS
            index = ((shift + 1) << _SUB_BITS) + ((value >> shift) & (_SUB - 1))
        self.counts[index] += 1
        self.count += 1
        self.total += value
        if value > self.maximum:
            self.maximum = value

    def copy(self) -> Histogram:
        """As it is now; far cheaper than to look at it, which can then be done elsewhere."""
        out = Histogram()
        out.counts = self.counts.copy()
        out.count, out.total, out.maximum = self.count, self.total, self.maximum
        return out

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentiles(self, *ps: float) -> list[float]:
        """The values at percentiles (0..100), which rise: the middles of their buckets; 0.0 when
        empty."""
        ranks = [max(1, -(-self.count * p // 100)) for p in ps]
        out: list[float] = []
        seen = 0
        for i in sorted(self.counts):
            seen += self.counts[i]
            while len(out) < len(ranks) and seen >= ranks[len(out)]:
                lo, hi = self.bounds(i)
                out.append(min((lo + hi - 1) / 2, float(self.maximum)))
            if len(out) == len(ranks):
                break
        return out + [float(self.maximum)] * (len(ranks) - len(out))

    def summary(self) -> dict[str, float]:
        """count, and mean/p50/p90/p99/max/sum in milliseconds (for values in nanoseconds)."""
        p50, p90, p99 = self.percentiles(50, 90, 99)
        return {
            "count": self.count,
            "mean_ms": self.mean / 1e6,
            "p50_ms": p50 / 1e6,
            "p90_ms": p90 / 1e6,
            "p99_ms": p99 / 1e6,
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
        try:
            self._buckets[i] += n
        except KeyError:
            self._buckets[i] = n
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

    Each field says what it is: the OpenAPI document is made from these words. The time summaries
    are :meth:`Histogram.summary` maps. What counts as a copy is in docs/engines.md.
    """

    stage: Annotated[int, "number of the stage; never used again"]
    block: Annotated[str, "name of its block"]
    queue: Annotated[int, "requests that wait now"]
    queue_rows: Annotated[int, "rows that wait now"]
    requests: Annotated[int, "requests computed"]
    rows: Annotated[int, "rows computed, without those that failed"]
    batches: Annotated[int, "batches computed"]
    failures: Annotated[
        int, "requests that ended with an error here, those that expired in its queue among them"
    ]
    expired: Annotated[int, "requests dropped because their deadline had passed"]
    lam: Annotated[float, "arrival rate, rows per second (thesis, eq. 4.2)"]
    mu: Annotated[
        float,
        "service rate while computing, in all lanes that it may take, rows per second; "
        "0 = nothing computed yet",
    ]
    rho: Annotated[float, "load: lam / mu; 0 where mu is 0"]
    rows_per_s: Annotated[float, "rows computed per second"]
    mean_batch_rows: Annotated[float, "rows per batch, with those that failed"]
    wait: Annotated[Mapping[str, float], "time of requests in the queue"] = field(
        default_factory=dict
    )
    overhead: Annotated[
        Mapping[str, float], "time of requests in the worker that is neither waiting nor computing"
    ] = field(default_factory=dict)
    compute: Annotated[
        Mapping[str, float], "time of batches in the engine; on a GPU, to order the work"
    ] = field(default_factory=dict)
    device: Annotated[
        Mapping[str, float], "time of batches on the GPU, also after the host has ordered them"
    ] = field(default_factory=dict)
    bytes_out: Annotated[int, "bytes of results published"] = 0
    copies_out: Annotated[int, "whole results that were copied"] = 0
    bytes_copied_in: Annotated[int, "bytes of the inputs that were copied"] = 0
    copies_in: Annotated[int, "whole inputs that were copied"] = 0
    elements_in: Annotated[int, "elements that the engine was given, padding among them"] = 0
    elements_padded: Annotated[int, "of these, elements that only made inputs equally long"] = 0
    failed_rows: Annotated[
        int,
        "rows that failed in batches that were computed; of the failures before that, and of a "
        "batch that ran out of its time, no rows are counted",
    ] = 0
    engine: Annotated[str, "the engine that really runs"] = ""
    precision: Annotated[str, "the precision that it computes in"] = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ProcessKpi:
    """One process's resources; each field says what it is, as those of :class:`StageKpi` do.

    Memory in bytes. GPU fields are None where there is no GPU or it does not know the figure; all
    but ``gpu_memory`` are the whole device's, whoever uses it.
    """

    pid: Annotated[int, "process id"]
    cpu_percent: Annotated[float, "cpu time since the last sample, percent of one core"]
    cpu_mhz: Annotated[float, "mean clock of the machine's cores, MHz; 0 = not known"]
    rss: Annotated[int, "resident memory, bytes"]
    pss: Annotated[int, "proportional share of resident memory, bytes"]
    uss: Annotated[int, "private memory, bytes"]
    threads: Annotated[int, "threads, those of native libraries included"]
    fds: Annotated[int, "open file descriptors"]
    arena_bytes: Annotated[int, "largest size of its arena, bytes"] = 0
    arena_used: Annotated[int, "bytes of the arena in slots that are out"] = 0
    arena_committed: Annotated[int, "bytes of the arena that are set aside in memory"] = 0
    slots: Annotated[int, "slots of its arena"] = 0
    slots_used: Annotated[int, "slots that are out"] = 0
    gpu_util_percent: Annotated[float | None, "time in which the GPU was busy, percent"] = None
    gpu_memory: Annotated[
        int | None, "GPU memory of this process, bytes; null also where process ids are hidden"
    ] = None
    gpu_clock_mhz: Annotated[float | None, "clock of the GPU's multiprocessors, MHz"] = None
    gpu_temperature_c: Annotated[float | None, "temperature of the GPU, degrees Celsius"] = None
    gpu_memory_clock_mhz: Annotated[float | None, "clock of the GPU's memory, MHz"] = None
    gpu_power_w: Annotated[float | None, "power of the GPU, watts"] = None
    gpu_energy_j: Annotated[
        float | None,
        "energy of the GPU since the first sample, joules; null where the device tells none",
    ] = None
    gpu_mj_per_row: Annotated[
        float | None,
        "the GPU's energy for each row that this process computed, over the last seconds, mJ; null "
        "also when it computed none",
    ] = None
    torch_allocated: Annotated[int | None, "bytes of torch's GPU memory pool in use"] = None
    torch_reserved: Annotated[int | None, "bytes that torch's GPU memory pool holds"] = None
    h2d_copies: Annotated[int, "copies from host to device"] = 0
    h2d_bytes: Annotated[int, "bytes copied from host to device"] = 0
    d2h_copies: Annotated[int, "copies from device to host"] = 0
    d2h_bytes: Annotated[int, "bytes copied from device to host"] = 0
    d2d_copies: Annotated[int, "copies from another device"] = 0
    d2d_bytes: Annotated[int, "bytes copied from another device"] = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
