"""What the Dispatcher counts: per task and in all. Memory is bounded by the published tasks.

There may be thousands of them, and the data thread serves nobody while it copies their figures: a
sample has those of some (:mod:`blockflow.core.roster`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from blockflow.core.metrics import Histogram, RateMeter
from blockflow.core.roster import Roster


class Leg:
    """Tensors that went one way between clients and the Dispatcher.

    ``slot`` and ``message`` count (tensors, bytes) by the way they took, ``copies`` what the
    Dispatcher itself copied; a socket adds its own two.
    """

    __slots__ = ("copies", "message", "slot")

    def __init__(self) -> None:
        self.slot = [0, 0]
        self.message = [0, 0]
        self.copies = 0

    def count(self, nbytes: int, by_slot: bool, copies: int) -> None:
        way = self.slot if by_slot else self.message
        way[0] += 1
        way[1] += nbytes
        self.copies += copies

    def to_dict(self) -> dict[str, int]:
        return {
            "slot": self.slot[0],
            "slot_bytes": self.slot[1],
            "message": self.message[0],
            "message_bytes": self.message[1],
            "copies": self.copies,
        }


class Legs:
    """Both directions since the Dispatcher started.

    Attributes:
        arrived: inputs that were admitted.
        left: results that were made ready for their clients.
    """

    __slots__ = ("arrived", "left")

    def __init__(self) -> None:
        self.arrived = Leg()
        self.left = Leg()

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {"in": self.arrived.to_dict(), "out": self.left.to_dict()}


class VariantStats:
    """What was answered by one of the two paths of a task that has a canary."""

    __slots__ = ("failed", "latency", "ok")

    def __init__(self) -> None:
        self.ok = 0
        self.failed: Counter[str] = Counter()
        self.latency = Histogram()

    def freeze(self) -> VariantStats:
        out = VariantStats()
        out.ok, out.failed, out.latency = self.ok, self.failed.copy(), self.latency.copy()
        return out

    def to_dict(self) -> dict[str, Any]:
        return {
            "answered": self.ok + self.failed.total(),
            "ok": self.ok,
            "failed": dict(self.failed),
            "latency": self.latency.summary(),
        }


class TaskStats:
    """One published task since the Dispatcher started.

    ``latency`` is from receipt to the encoding of the reply, ``ingress`` until the input was on its
    way, ``egress`` from the last block's stamp to the encoding (the final transit is in it).
    ``limit`` is how many credits are in force. ``variants`` tells ``stable`` from ``canary`` since
    the canary's path was published.
    """

    __slots__ = (
        "canary",
        "egress",
        "failed",
        "ingress",
        "latency",
        "limit",
        "ok",
        "per_s",
        "rate",
        "rejected",
        "requests",
        "rows",
        "variants",
    )

    def __init__(self) -> None:
        self.canary: tuple[str, ...] = ()
        self.variants: dict[str, VariantStats] = {}
        self.requests = 0
        self.rows = 0
        self.ok = 0
        self.failed: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.latency = Histogram()
        self.ingress = Histogram()
        self.egress = Histogram()
        self.rate = RateMeter()
        self.per_s = 0.0
        self.limit = 0

    def freeze(self, now_ns: int, limit: int) -> TaskStats:
        """The figures as they are now. Cheap: percentiles are for whoever reads the copy."""
        out = TaskStats()
        out.requests, out.rows, out.ok = self.requests, self.rows, self.ok
        out.failed, out.rejected = self.failed.copy(), self.rejected.copy()
        out.latency = self.latency.copy()
        out.ingress, out.egress = self.ingress.copy(), self.egress.copy()
        out.per_s, out.limit = self.rate.rate(now_ns), limit
        out.variants = {name: variant.freeze() for name, variant in self.variants.items()}
        return out

    def tries(self, path: tuple[str, ...]) -> None:
        """``path`` is the canary's from now on; () = there is none."""
        if path != self.canary:
            self.canary = path
            self.variants = {"stable": VariantStats(), "canary": VariantStats()} if path else {}

    def variant(self, canary: bool, trial: tuple[str, ...] | None) -> VariantStats | None:
        """Where an answer counts besides; None while nothing is tried, or something else than the
        ``trial`` that was published when its request set out (None: the present one)."""
        if trial is not None and trial != self.canary:
            return None
        return self.variants.get("canary" if canary else "stable")

    def to_dict(self) -> dict[str, Any]:
        """Counts, ``per_s`` (answers per second as of the freeze) and summaries in milliseconds."""
        return {
            "requests": self.requests,
            "rows": self.rows,
            "ok": self.ok,
            "failed": dict(self.failed),
            "rejected": dict(self.rejected),
            "per_s": self.per_s,
            "limit": self.limit,
            "latency": self.latency.summary(),
            "ingress": self.ingress.summary(),
            "egress": self.egress.summary(),
            "variants": {name: variant.to_dict() for name, variant in self.variants.items()},
        }


class Sample:
    """The figures of one moment, for another thread.

    Attributes:
        news: some task has something new to tell.
    """

    __slots__ = ("events", "gauges", "news", "rejected", "tasks")

    def __init__(self, stats: DispatcherStats, gauges: dict[str, Any]) -> None:
        self.tasks: dict[str, TaskStats] = {}
        self.rejected, self.events = stats.rejected.copy(), stats.events.copy()
        self.gauges = gauges
        self.news = False

    def common(self) -> dict[str, Any]:
        """What is no task's."""
        return {"rejected": dict(self.rejected), "events": dict(self.events), **self.gauges}

    def to_dict(self) -> dict[str, Any]:
        """``extra`` of a Stats message."""
        return {
            "tasks": {name: task.to_dict() for name, task in self.tasks.items()},
            **self.common(),
        }


class DispatcherStats:
    """Counters of the whole Dispatcher and of its tasks.

    ``rejected`` counts refused requests by code (those that name no task as well), ``events`` what
    went wrong at the sockets: ``malformed_client``, ``malformed_data``, ``unreadable_data``,
    ``client_gone``, ``slow_client``, ``defects``.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, TaskStats] = {}
        self.rejected: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._roster = Roster[str]()

    def publish(
        self, names: Iterable[str], canaries: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """Keep the figures of these tasks, begin new ones, forget those that are gone.

        ``canaries`` are the paths that are being tried, by task.
        """
        self.tasks = {n: self.tasks.get(n) or TaskStats() for n in names}
        for name, task in self.tasks.items():
            task.tries((canaries or {}).get(name, ()))
        self._roster.keep(self.tasks)

    def admitted(self, names: Iterable[str], rows: int) -> None:
        for name in names:
            task = self._changed(name)
            if task is not None:
                task.requests += 1
                task.rows += rows

    def refused(self, names: Iterable[str], code: str) -> None:
        """A request was answered without being admitted."""
        self.rejected[code] += 1
        for name in names:
            task = self._changed(name)
            if task is not None:
                task.rejected[code] += 1

    def succeeded(
        self,
        name: str,
        total_ns: int,
        ingress_ns: int,
        egress_ns: int,
        now_ns: int,
        *,
        canary: bool = False,
        trial: tuple[str, ...] | None = None,
    ) -> None:
        task = self._changed(name)
        if task is not None:
            task.ok += 1
            task.rate.add(1, now_ns)
            task.latency.record(total_ns)
            task.ingress.record(ingress_ns)
            task.egress.record(egress_ns)
            variant = task.variant(canary, trial) if task.variants else None
            if variant is not None:
                variant.ok += 1
                variant.latency.record(total_ns)

    def failed(
        self,
        name: str,
        code: str,
        *,
        canary: bool = False,
        trial: tuple[str, ...] | None = None,
    ) -> None:
        task = self._changed(name)
        if task is not None:
            task.failed[code] += 1
            variant = task.variant(canary, trial)
            if variant is not None:
                variant.failed[code] += 1

    def sample(
        self, now_ns: int, gauges: dict[str, Any], limit: Callable[[str], int] = lambda _: 0
    ) -> Sample:
        """Figures for another thread.

        Args:
            now_ns: monotonic clock.
            gauges: further figures of the moment (requests in flight).
            limit: gives the credits in force for a task.
        """
        out = Sample(self, gauges)
        news, others = self._roster.take()
        out.news = bool(news)
        for name in (*news, *others):
            out.tasks[name] = task = self.tasks[name].freeze(now_ns, limit(name))
            if task.per_s:
                self._roster.fades(name)
        return out

    def _changed(self, name: str) -> TaskStats | None:
        task = self.tasks.get(name)  # names that are not deployed get no entry: they may be any
        if task is not None:
            self._roster.note(name)
        return task
