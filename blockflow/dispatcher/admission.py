"""Admission: who may enter, decided by credits. Pure: ``now`` is given, nothing is waited for.

A credit is the right to be in flight; there are fewer credits than slots and queue places, so
that an overload is answered at the door with a typed rejection and memory stays flat. Each task has
a pool of its own, whose adaptive limit keeps its queues short, so that a task whose blocks idle is
not held back by another one's overload. Where credits are short, clients get fair shares of them,
and so do tasks: one that cannot keep up would otherwise take them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.core.errors import RequestError
from blockflow.core.metrics import RateMeter
from blockflow.core.records import record
from blockflow.core.routing import TaskRoute
from blockflow.dispatcher.adaptive import AdaptiveLimit
from blockflow.dispatcher.fairness import FairShares

_MIN_RETRY_MS = 5
_MAX_RETRY_MS = 1000
_UNKNOWN_RETRY_MS = 100
_SHARE_FREED = 8
_OVERSHOOT = 2
"""A client below its share may enter above an adaptive limit, by this factor at most: those who
hold more than theirs leave in time, and nobody has to wait for that."""


@dataclass(frozen=True, slots=True)
class Admit:
    """The request may enter."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is answered with ``error`` at once."""

    error: RequestError


ADMIT = Admit()


def _share_of(tasks: Iterable[str]) -> tuple[str, ...]:
    """Requests for the same tasks compete as one, in whatever order they name them."""
    return tuple(sorted(tasks))


class _Pool:
    """The credits of one task, or of all together (``adaptive`` None: they are as configured)."""

    __slots__ = ("_most", "adaptive", "shares")

    def __init__(self, most: int, adaptive: AdaptiveLimit | None) -> None:
        self._most = most
        self.adaptive = adaptive
        self.shares = FairShares()

    @property
    def limit(self) -> int:
        """Credits in force."""
        return self._most if self.adaptive is None else self.adaptive.limit

    def refusal(self, client: Hashable, now_ns: int) -> str:
        """Why one more of ``client`` may not enter: ``limit``, ``share`` or nothing."""
        inflight, limit = self.shares.inflight, self.limit
        if 2 * inflight < limit:
            return ""
        if not self.shares.below_share(client, limit, now_ns):
            return "limit" if inflight >= limit else "share"
        return "" if inflight < min(self._most, _OVERSHOOT * limit) else "limit"

    def unmet_deadline_ns(self, budget_ns: int, now_ns: int) -> int:
        """How long a request would take that cannot make it in ``budget_ns``; 0 when it can."""
        adaptive = self.adaptive
        if adaptive is None or self.shares.inflight < adaptive.floor:
            return 0
        wait = adaptive.wait_ns(self.shares.inflight + 1, now_ns)
        return wait if wait > budget_ns else 0


@record
class _Pass:
    """An admitted request: ``pools`` by task with the requests in flight when it came in, and the
    limit that it teaches: an update that changes the path begins another one."""

    client: bytes
    tasks: tuple[str, ...]
    pools: dict[str, tuple[_Pool, int, AdaptiveLimit | None]]
    budget_ns: int


class Admission:
    """Credits in total, per client and per task.

    The caller asks :meth:`decide`, then says :meth:`enter`, :meth:`answered` or :meth:`expired` for
    each task that it knows more of, and :meth:`leave`.

    Args:
        max_inflight: requests in flight at once.
        max_inflight_per_client: of which one client may have this many.
        max_bytes: retained input bytes at once.
        adaptive: whether a task's credits follow its measured queueing (:class:`AdaptiveLimit`),
            and hopeless deadlines are refused.

    Attributes:
        refused: refusals by reason: ``credits``, ``client``, ``memory``, ``rows``, ``limit``,
            ``share``, ``deadline``, ``edge``, ``waiting``.
    """

    __slots__ = (
        "_adaptive",
        "_all",
        "_by_task",
        "_completions",
        "_passes",
        "_pools",
        "max_bytes",
        "max_inflight",
        "max_inflight_per_client",
        "refused",
    )

    def __init__(
        self,
        max_inflight: int,
        max_inflight_per_client: int,
        max_bytes: int,
        adaptive: bool = True,
    ) -> None:
        if max_inflight < 1 or max_inflight_per_client < 1:
            raise ValueError("credits must be positive")
        self.max_inflight = max_inflight
        self.max_inflight_per_client = max_inflight_per_client
        self.max_bytes = max_bytes
        self.refused: Counter[str] = Counter()
        self._adaptive = adaptive
        self._all = _Pool(max_inflight, None)
        self._by_task = _Pool(max_inflight, None)  # "clients" are tasks, or sets of them
        self._pools: dict[str, _Pool] = {}
        self._passes: dict[Hashable, _Pass] = {}
        self._completions = RateMeter()

    @property
    def bounds(self) -> dict[str, int]:
        """What clients are told of it."""
        return {
            "max_inflight": self.max_inflight,
            "max_inflight_per_client": self.max_inflight_per_client,
        }

    def publish(self, tasks: Mapping[str, TaskRoute]) -> None:
        """Keep what was learnt of these tasks, unless their path or its batches changed in size."""
        pools = {}
        for name, task in tasks.items():
            known = self._pools.get(name)
            fresh = None
            if self._adaptive:
                fresh = AdaptiveLimit(self.max_inflight, len(task.path), task.batch_rows)
            if known is None:
                known = _Pool(self.max_inflight, fresh)
            elif fresh and known.adaptive and known.adaptive.floor != fresh.floor:
                known.adaptive = fresh
            pools[name] = known
        self._pools = pools

    def decide(
        self,
        client: bytes,
        tasks: Iterable[str],
        *,
        inflight: int,
        of_client: int,
        charged: int,
        nbytes: int,
        budget_ns: int,
        now_ns: int,
    ) -> Admit | Reject:
        """May one more request of ``nbytes`` enter?

        ``inflight`` and ``of_client`` count the requests in flight, ``charged`` their input bytes;
        ``budget_ns`` is the time to its deadline.
        """
        names = _share_of(tasks)
        if nbytes > self.max_bytes:  # to try again would not help
            text = f"an input of {nbytes} bytes: all together may have {self.max_bytes}"
            return Reject(RequestError("TOO_LARGE", text, hint="send fewer rows per request"))
        if inflight >= self.max_inflight:
            self._all.shares.refused(client)
            self._by_task.shares.refused(names)
            why = f"all {self.max_inflight} credits are in use"
            return self._reject("credits", why, inflight, now_ns)
        if of_client >= self.max_inflight_per_client:
            why = f"this client has {of_client} requests in flight, its share of the credits"
            return self._reject("client", why, of_client, now_ns)
        if charged + nbytes > self.max_bytes:
            return self.no_space(nbytes, inflight, now_ns)
        if self._all.refusal(client, now_ns):
            return self._over(self._all, "share", client, "", inflight, now_ns)
        if self._by_task.refusal(names, now_ns):
            shares = self._by_task.shares
            shares.refused(names)
            why = f"{shares.of(names)} requests for {', '.join(names)[:200]} are in flight, their "
            return self._reject("share", why + "fair share of the credits", inflight, now_ns)
        for name in names:
            pool = self._pools.get(name)
            if pool is None:
                continue
            reason = pool.refusal(client, now_ns)
            if reason:
                return self._over(pool, reason, client, name, inflight, now_ns)
            wait = pool.unmet_deadline_ns(budget_ns, now_ns)
            if wait:
                why = (
                    f"a request for task {name!r} takes at least {wait // 1_000_000} ms now, "
                    f"{budget_ns // 1_000_000} ms are left"
                )
                return self._reject("deadline", why, inflight, now_ns)
        return ADMIT

    def _over(
        self, pool: _Pool, reason: str, client: bytes, task: str, inflight: int, now_ns: int
    ) -> Reject:
        pool.shares.refused(client)
        of = f" of task {task!r}" if task else ""
        if reason == "share":
            why = f"this client has {pool.shares.of(client)} requests{of} in flight, its fair share"
        else:
            why = f"{pool.shares.inflight} requests{of} are in flight; more would only queue"
        return self._reject(reason, why, inflight, now_ns)

    def enter(
        self, key: Hashable, client: bytes, tasks: Iterable[str], budget_ns: int, now_ns: int
    ) -> None:
        """An admitted request sets out; ``key`` names it until it leaves."""
        names = _share_of(tasks)
        self._all.shares.enter(client, now_ns)
        self._by_task.shares.enter(names, now_ns)
        pools = {}
        for name in names:
            pool = self._pools.get(name)
            if pool is not None:
                pools[name] = (pool, pool.shares.enter(client, now_ns), pool.adaptive)
        self._passes[key] = _Pass(client, names, pools, budget_ns)

    def answered(
        self, key: Hashable, task: str, queued_ns: int, worked_ns: int, now_ns: int
    ) -> None:
        """The result of one task of a request has come: where its time went."""
        self._sample(key, task, (queued_ns, worked_ns), now_ns)

    def expired(self, key: Hashable, task: str, now_ns: int) -> None:
        """The deadline has passed before one task of a request had its result."""
        self._sample(key, task, None, now_ns)

    def _sample(self, key: Hashable, task: str, spent: tuple[int, int] | None, now_ns: int) -> None:
        taken = self._passes.get(key)
        if taken is None or task not in taken.pools:
            return
        _, ahead, adaptive = taken.pools[task]
        if adaptive is None:
            return
        if spent is None:
            adaptive.expired(ahead, taken.budget_ns, now_ns)
        else:
            adaptive.sample(ahead, *spent, taken.budget_ns, now_ns)

    def leave(self, key: Hashable, now_ns: int) -> None:
        """A request has ended, however it did; the rate of that says when credits will be free."""
        self._completions.add(1, now_ns)
        taken = self._passes.pop(key, None)
        if taken is not None:
            self._all.shares.leave(taken.client)
            self._by_task.shares.leave(taken.tasks)
            for pool, *_ in taken.pools.values():
                pool.shares.leave(taken.client)

    @property
    def inflight(self) -> int:
        """Requests that have entered and not left."""
        return self._all.shares.inflight

    def figures(self) -> dict[str, Any]:
        """Credits in all, and refusals by reason."""
        return {"credits": self.max_inflight, "refused": dict(self.refused)}

    def limit(self, task: str) -> int:
        """Credits in force for a task; 0 for one that is not published."""
        pool = self._pools.get(task)
        return pool.limit if pool is not None else 0

    def no_space(self, nbytes: int, inflight: int, now_ns: int) -> Reject:
        """The memory for retained inputs is used up (also said when no slot is free)."""
        return self._reject("memory", f"no room for {nbytes} bytes of input now", inflight, now_ns)

    def no_edge(self, worker: str, inflight: int, now_ns: int) -> Reject:
        """The slots of a worker on a ring of workers are spoken for (:class:`EdgeBook`)."""
        why = f"worker {worker} has no slot left for tensors on their way back"
        return self._reject("edge", why, inflight, now_ns)

    def no_place(self, why: str, inflight: int, now_ns: int) -> Reject:
        """Its worker is being replaced, and no more requests may wait for that."""
        return self._reject("waiting", why, inflight, now_ns, _MAX_RETRY_MS)

    def check_tasks(
        self,
        tasks: Sequence[TaskRoute],
        rows_of: Callable[[str], int],
        rows: int,
        inflight: int,
        now_ns: int,
    ) -> None:
        """May ``rows`` more rows of these tasks enter, by the tasks' own bounds?

        A request that is larger than the bound itself runs when nothing else of the task does.

        Raises:
            RequestError: OVERLOADED.
        """
        for task in tasks:
            there = rows_of(task.name) if task.max_inflight_rows else 0
            if there and there + rows > task.max_inflight_rows:
                why = f"task {task.name!r} has {there} of {task.max_inflight_rows} rows under way"
                raise self._reject("rows", why, inflight, now_ns).error

    def retry_after_ms(self, inflight: int, now_ns: int) -> int:
        """When a retry makes sense: the time in which an eighth of what is in flight completes.

        Waiting for one credit only would bring all who were turned away back at the same moment.
        """
        rate = self._completions.pace(now_ns)
        if rate <= 0.0:
            return _UNKNOWN_RETRY_MS
        ms = 1000.0 * max(1, inflight // _SHARE_FREED) / rate
        return int(min(max(ms, _MIN_RETRY_MS), _MAX_RETRY_MS))

    def _reject(
        self, reason: str, why: str, inflight: int, now_ns: int, after_ms: int = 0
    ) -> Reject:
        self.refused[reason] += 1
        after = after_ms or self.retry_after_ms(inflight, now_ns)
        return Reject(
            RequestError(
                "OVERLOADED",
                why,
                hint=f"try again in {after} ms",
                retry_after_ms=after,
            )
        )
