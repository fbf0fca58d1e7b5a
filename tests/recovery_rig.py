"""An in-flight table with the routes and the deaths that a test says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.entry import Answer, Entry, ReleaseInput, Reply, Supersede
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.recovery import Death
from blockflow.dispatcher.retry import RetryBudget

CONTRACT = Contract(TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 4)))
PATHS = {
    "a": ("trunk", "head_a"),
    "b": ("trunk", "head_b"),
    "t": ("trunk",),
    "deep": ("trunk", "mid", "head_a"),
}
SECOND = 1_000_000_000


class World:
    """A table whose routes are given as block -> incarnations; deadlines are at 10 s.

    Attributes:
        superseded: attempts that were left; they are not among what its methods return.
    """

    def __init__(self, budget: int = 100, once: Iterable[str] = (), **workers: list[int]) -> None:
        self.superseded: list[Supersede] = []
        self.planner = Planner()
        self.table = InFlightTable(7, self.planner, RetryBudget(budget))
        self.once = frozenset(once)
        self.version = 0
        self.count = 0
        self.publish(**workers)

    def publish(
        self,
        *,
        epoch: int = 1,
        down: Mapping[str, str] | None = None,
        contract: Contract = CONTRACT,
        max_rows: int = 8,
        paths: Mapping[str, tuple[str, ...]] = PATHS,
        **workers: list[int],
    ) -> list[Any]:
        self.version += 1
        routes = {}
        for block, incarnations in workers.items():
            for inc in incarnations:
                # A stage belongs to one life; blocks of one worker have stages of their own.
                stage = inc * 100 + sorted(workers).index(block)
                routes[stage] = StageRoute(
                    stage,
                    block,
                    f"{block}#{inc}",
                    inc,
                    f"ipc://{inc}",
                    "tensormq",
                    replayable=block not in self.once,
                )
        tasks = {n: TaskRoute(n, p, contract, max_rows=max_rows) for n, p in paths.items()}
        self.planner.replace(RouteTable(epoch, self.version, routes, tasks, (), down or {}))
        return self.rest(self.table.published())

    def rest(self, out: list[Any]) -> list[Any]:
        """What was instructed besides leaving attempts."""
        self.superseded += [i for i in out if isinstance(i, Supersede)]
        return [i for i in out if not isinstance(i, Supersede)]

    def admit(self, *tasks: str, rows: int = 1, deadline_ns: int = 10 * SECOND) -> Entry:
        self.count += 1
        return self.table.admit(
            b"client",
            self.count.to_bytes(16, "big"),
            tasks,
            self.planner.way([self.planner.task(t) for t in tasks]),
            rows=rows,
            deadline_ns=deadline_ns,
            received_ns=0,
            retained="input",
            charged=8,
        )

    def die(
        self,
        incarnation: int,
        *at_work: Entry,
        hop: int = 0,
        now_ns: int = 0,
        unsent: Iterable[Entry] = (),
    ) -> list[Any]:
        records = [e.ticket + bytes([e.attempt, hop]) for e in at_work]
        return self.gone(incarnation, records, now_ns, {e.ticket for e in unsent})

    def gone(
        self, incarnation: int, records: list[bytes], now_ns: int = 0, unsent: Iterable[bytes] = ()
    ) -> list[Any]:
        death = Death.of(incarnation, records, set(unsent))
        return self.rest(self.table.peer_gone(death, now_ns))

    def answer(self, entry: Entry, end: int = -1) -> list[Any]:
        """The result of the present attempt's ``end``-th task."""
        node = entry.plan.ends[end]
        sender = entry.plan.incarnations[node]
        answer = Answer(entry.attempt, (), 0)
        return self.rest(self.table.outcome(entry.ticket, entry.attempt, node, sender, answer))

    def left(self) -> tuple[int, int, int]:
        return len(self.table), self.table.waiting, self.table.charged


def codes(entry: Entry) -> list[str]:
    return [e.outcome.code for e in entry.results() if not isinstance(e.outcome, Answer)]


def message(entry: Entry) -> str:
    (error,) = {str(e.outcome) for e in entry.results() if not isinstance(e.outcome, Answer)}
    return error


def done(entry: Entry) -> list[Any]:
    return [Reply(entry), ReleaseInput(entry)]
