"""What clients do to a system and to each other: deadlines, cancellations, shares, slow readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import zmq

from blockflow.bench.chaos.lag import Lag
from blockflow.bench.own_system import own_settings
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.beside import ROUND_S, Neighbours
from blockflow.bench.reliability.figures import counted, timed
from blockflow.bench.reliability.peer import (
    BURST,
    LARGE,
    LARGE_COLUMNS,
    LARGE_ROWS,
    Array,
    Peer,
)
from blockflow.bench.results import Figure
from blockflow.bench.statistics import jain
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SLOW, WORK, SMALL = "slow", "work", "small"
_DELAYS_MS = {SLOW: 300.0, WORK: 20.0, SMALL: 0.0, LARGE: 0.0}
_SMALL_SPEC = TensorSpec("float32", ("rows", 4))
_LARGE_SPEC = TensorSpec("float32", ("rows", LARGE_COLUMNS))
X: Array = np.ones((1, 4), np.float32)
_OFFERS = (0.5, 0.5, 1.0, 2.0)
"""Of the capacity, by four clients: all of them want more than the quarter that is their share."""
_PATIENCE_S = 30.0
_IDLE_S = 1.5
GRACE_MS = 100.0
"""A reply is due by the deadline and this."""
_SEED = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """How many requests with short deadlines, rounds of cancellations, seconds of fair sharing,
    clients that do not read, and pairs of rounds beside one (of so many seconds each)."""

    deadlines: int = 200
    cancels: int = 8
    share_s: float = 10.0
    cuts: int = 4
    pairs: int = 400
    round_s: float = ROUND_S


QUICK = Plan(10, 1, 1.0, 1, 1, 0.4)


@contextmanager
def running(folder: Path) -> Iterator[System]:
    """A system whose blocks take their time, or give much."""
    repository = BlockRepository(folder / "blocks")
    for name, delay_ms in _DELAYS_MS.items():
        spec = _LARGE_SPEC if name == LARGE else _SMALL_SPEC
        save_echo(repository, name, spec, settings={"delay_ms": delay_ms})
    with System(own_settings(folder)) as system:
        blocks = [
            {"name": n, "slots": 64, "arena_mib": 512 if n == LARGE else 16} for n in _DELAYS_MS
        ]
        system.apply({"blocks": blocks, "tasks": {n: [n] for n in _DELAYS_MS}})
        yield system


@dataclass(slots=True)
class Bench:
    """The experiments with one running system."""

    system: System
    plan: Plan
    say: Callable[[str], None]
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)

    def run(self) -> list[Figure]:
        """All of them."""
        try:
            with Client(self.system.client_endpoint) as client:
                client.wait_ready(list(_DELAYS_MS))
            return [*self.deadlines(), *self.cancels(), *self.shares(), *self.slow_readers()]
        finally:
            self.context.term()

    def _peer(self, holds: int = 1000) -> Peer:
        """Over a unix socket: it holds little, so what is not read stays with the Dispatcher."""
        ipc = next(e for e in self.system.client_endpoints if e.startswith("ipc://"))
        return Peer(self.context, ipc, holds)

    # --- deadlines and cancellations ------------------------------------------------------------

    def deadlines(self) -> list[Figure]:
        """Requests of which most cannot be answered in time: how late is any reply to them, be it
        a result or an error?"""
        self.say("deadlines")
        chance = Random(_SEED)
        peer = self._peer()
        lag = Lag()
        due: dict[bytes, float] = {}
        came: list[tuple[float, float]] = []

        def collect(timeout_s: float) -> None:
            for request_id, _ in peer.replies(timeout_s):
                came.append((due.pop(request_id), time.monotonic()))

        for _ in range(self.plan.deadlines):
            deadline_ms = chance.randrange(40, 240)
            due[peer.ask(SLOW, X, deadline_ms)] = time.monotonic() + deadline_ms / 1e3
            collect(0.03)
        end = time.monotonic() + _PATIENCE_S
        while due and time.monotonic() < end:
            collect(0.1)
        peer.close()
        book = lag.stop()
        missing = counted(names.NO_REPLY, len(due), self.plan.deadlines)
        if not came:
            return [missing]
        late_ms = [1e3 * (done - at) for at, done in came]
        too_late = [(at, done) for at, done in came if 1e3 * (done - at) > GRACE_MS]
        # One hiccup of this machine excuses no more than what was due around it.
        beyond = sum(
            1e3 * (done - at - book.allowance(at, done)) > GRACE_MS for at, done in too_late
        )
        return [
            timed(names.LATENESS, "all", [max(0.0, ms) for ms in late_ms]),
            counted(names.AFTERWARDS, sum(ms > 0 for ms in late_ms), len(late_ms)),
            counted(names.OVERDUE, len(too_late), len(late_ms), {"beyond_lag": beyond}),
            missing,
        ]

    def cancels(self) -> list[Figure]:
        """Requests that are cancelled in a worker's queue: when do they end, and does one run?"""
        self.say("cancellations")
        peer = self._peer()
        self._await_idle(SLOW)
        before, answered = self._batches(SLOW), 0
        took_ms: list[float] = []
        for _ in range(self.plan.cancels):
            first = peer.ask(SLOW, X)
            waiting = {peer.ask(SLOW, X): 0.0 for _ in range(10)}
            time.sleep(0.06)  # they lie in the worker's queue, behind a forward of 300 ms
            for request_id in waiting:
                waiting[request_id] = time.monotonic()
                peer.cancel(request_id)
            open_requests = {first, *waiting}
            while open_requests:
                many = len(open_requests)
                for request_id, outcome in peer.replies(_PATIENCE_S):
                    open_requests.discard(request_id)
                    answered += outcome == "ok"
                    if outcome == "CANCELLED":
                        took_ms.append(1e3 * (time.monotonic() - waiting[request_id]))
                if len(open_requests) == many:
                    peer.close()
                    raise BlockFlowError("TIMEOUT", f"{many} requests got no reply", where=SLOW)
        peer.close()
        self._await_idle(SLOW)
        in_vain = self._batches(SLOW) - before - answered
        return [
            timed(names.CANCELLED, "all", took_ms),
            counted(names.IN_VAIN, in_vain, len(took_ms)),
        ]

    def _batches(self, block: str) -> int:
        return int(self.system.commands.worker(f"{block}#0")["stages"][0]["kpi"].get("batches", 0))

    def _await_idle(self, block: str) -> None:
        """Until the figures of its worker have stood still for a while: they come four times a
        second."""
        last, since = -1, time.monotonic()
        while time.monotonic() - since < _IDLE_S:
            now = self._batches(block)
            if now != last:
                last, since = now, time.monotonic()
            time.sleep(0.1)

    # --- shares ---------------------------------------------------------------------------------

    def shares(self) -> list[Figure]:
        """Four clients ask for four times the capacity in all, the greediest for half of that."""
        self.say("shares")
        peers = [self._peer() for _ in _OFFERS]
        capacity = 1e3 / _DELAYS_MS[WORK]
        chance = [Random(f"{_SEED}/{n}") for n in range(len(peers))]
        begin = time.monotonic()
        due = [begin for _ in peers]
        warm, end = begin + 0.25 * self.plan.share_s, begin + 1.25 * self.plan.share_s
        served = [0 for _ in peers]
        while (now := time.monotonic()) < end:
            for n, peer in enumerate(peers):
                while due[n] <= now:
                    peer.ask(WORK, X, 2000)
                    due[n] += chance[n].expovariate(_OFFERS[n] * capacity)
                for _, outcome in peer.replies():
                    served[n] += outcome == "ok" and now >= warm
            time.sleep(max(0.0, min(0.002, min(due) - time.monotonic())))
        for peer in peers:
            peer.close()
        fair = sum(served) / len(served)
        labels = {"offered": list(_OFFERS), "served": served}
        smallest = min(served) / fair if fair else 0.0
        return [
            counted(names.SMALLEST_SHARE, smallest, sum(served), labels),
            counted(names.JAIN, jain(served) if fair else 0.0, sum(served)),
        ]

    # --- slow readers ---------------------------------------------------------------------------

    def slow_readers(self) -> list[Figure]:
        """When are they cut off, and what do the others notice?"""
        self.say("clients that do not read")
        self.system.commands.monitor(50.0)  # so that it is seen when one is cut off
        found = []
        for how, requests, rows in ((names.BY_BYTES, BURST, LARGE_ROWS), (names.BY_TIME, 6, 1)):
            times = [self._neglect(requests, rows) for _ in range(self.plan.cuts)]
            cut = [1e3 * t for t in times if t is not None]
            found.append(counted(f"{names.CUT_OFF} {how}", len(cut), len(times)))
            if cut:
                found.append(timed(names.CUT_OFF, how, cut))
        self.system.commands.monitor(4.0)
        self.say("others beside them")
        neighbours = Neighbours(self._peer, self._given_up, self.plan.round_s)
        return found + neighbours.run(self.system.client_endpoint, SMALL, X, self.plan.pairs)

    def _neglect(self, requests: int, rows: int) -> float | None:
        """Ask for replies and read none: seconds until the Dispatcher has cut it off; None: it has
        not. (A socket that nobody reads does not show that its connection has ended.)"""
        before, begin = self._given_up(), time.monotonic()
        peer = self._peer(holds=1)
        try:
            peer.burst(requests, rows)
            while (waited := time.monotonic() - begin) < _PATIENCE_S:
                if self._given_up() > before:
                    return waited
                time.sleep(0.01)
            return None
        finally:
            peer.close()

    def _given_up(self) -> int:
        """Clients that were cut off, by the Dispatcher's own figures."""
        events = self.system.commands.worker("dispatcher")["kpi"].get("events", {})
        return int(events.get("slow_client", 0))
