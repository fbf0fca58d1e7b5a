"""Health: asks the processes how they are, and tells who hangs; used by the Manager's thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from blockflow.control.controller import Controller
from blockflow.control.crew import Crew, ns
from blockflow.control.heartbeat import Hang, Heartbeat
from blockflow.control.pings import PingBook, Round
from blockflow.control.settings import Timing
from blockflow.core import limits
from blockflow.core.errors import SystemError_
from blockflow.core.lifecycle import State
from blockflow.launch.vitals import Vitals, read_vitals
from blockflow.tensormq.atwork import AtWorkReader, Work
from blockflow.wire.control import Pong

SERVING = frozenset({State.PROVING, State.READY, State.DRAINING})
"""States in which a process has to answer."""

UNBOUNDED_MS = 2 * limits.MAX_DEADLINE_MS
"""Longest forward of a block without a time-out: nobody can be waiting for it any more."""
_GRACE_NS = 500_000_000
"""A worker ends an overdue forward itself, and better: it answers for it. This long it may try."""
_LOST_NS = 1_000_000_000
"""A worker that ends removes its socket file itself; after so long it would have been reaped."""


class Health:
    """Pings, looks at the kernel's figures, and looks at what workers are at.

    Args:
        crew: who is asked. controller: carries the pings.
        run_dir: of this instance.
        timing: of the control plane.
        soon: runs something in the Manager's thread; called from the Controller's.

    Attributes:
        ping_ms: incarnation -> last round trip; who did not answer in time is not among them.
    """

    def __init__(
        self,
        crew: Crew,
        controller: Controller,
        run_dir: Path,
        timing: Timing,
        soon: Callable[[Callable[[], None]], None],
    ) -> None:
        self.ping_ms: dict[int, float] = {}
        self.heartbeat = Heartbeat(ns(timing.beat), ns(timing.silence), ns(timing.hang))
        self._crew = crew
        self._controller = controller
        self._run_dir = run_dir
        self._timing = timing
        self._soon = soon
        # An answer to a former Manager's ping must not be taken for one to ours.
        self._pings = PingBook(time.monotonic_ns() // 1_000_000)
        self._futures: dict[int, Future[Round]] = {}
        self._readers: dict[int, AtWorkReader] = {}
        self._ask_ns = 0
        self._lost_ns: dict[int, int] = {}

    # --- asking ---------------------------------------------------------------------------------

    def ask(self, names: set[str] | None) -> Future[Round]:
        """Ping the processes with these names (None = all) for somebody who waits for that."""
        lives = [x for x in self._crew.lives() if names is None or x.name in names]
        ping = self._begin({x.incarnation: x.name for x in lives})
        future: Future[Round] = Future()
        if lives:
            self._futures[ping.seq] = future
        else:
            future.set_result(ping)
        return future

    def pong(self, incarnation: int, message: Pong, read_ns: int) -> None:
        """An answer, and when it was read: our own looks, while it lay there, are none of its."""
        self.heartbeat.pong(incarnation, message.seq, message.heard, read_ns)
        ping = self._pings.pong(incarnation, message, read_ns)
        if ping is not None:
            self._end(ping)

    # --- lives ----------------------------------------------------------------------------------

    def loaded(self, incarnation: int) -> None:
        """A worker has its memory and files: keep an eye on its work, also beyond its end."""
        reader = AtWorkReader.open(self._run_dir, incarnation)
        if reader is not None:
            self._readers[incarnation] = reader

    def died(self, incarnation: int) -> tuple[Work, ...]:
        """What it was executing when it died; call it before its files are removed."""
        self.ping_ms.pop(incarnation, None)
        for ping in self._pings.gone(incarnation):
            self._end(ping)
        self.heartbeat.forget(incarnation)
        reader = self._readers.pop(incarnation, None)
        return () if reader is None else tuple(reader.read())

    # --- time -----------------------------------------------------------------------------------

    def deadline(self) -> int:
        """When :meth:`tick` is due at the latest."""
        times = (self._pings.deadline(), self.heartbeat.deadline(), self._ask_ns)
        return min(t for t in times if t is not None)

    def tick(self, now_ns: int) -> list[Hang]:
        """Ask and look, as often as is due. What has come in must have been taken before: whoever
        is judged now had the chance to answer.

        Returns:
            Who hangs.
        """
        for ping in self._pings.tick(now_ns):
            self._end(ping)
        due = self.heartbeat.deadline()
        hangs: list[Hang] = []
        if due is None or now_ns >= due:
            hangs = self._look(now_ns) + self._overdue(now_ns) + self._unreachable(now_ns)
        if now_ns >= self._ask_ns:
            self._ask_ns = now_ns + ns(self._timing.health)
            # After the look: the Controller's thread, which sends and reads, would wait for it.
            self._ask_all()
        return hangs

    def close(self) -> None:
        """Nobody will answer any more."""
        for future in self._futures.values():
            future.set_exception(SystemError_("NOT_RUNNING", "the control plane ended"))
        self._futures.clear()

    # --- steps ----------------------------------------------------------------------------------

    def _ask_all(self) -> None:
        lives = [x for x in self._crew.lives() if x.connected and x.state in SERVING]
        seq = self._begin({x.incarnation: x.name for x in lives}).seq
        self.heartbeat.asked(seq, [x.incarnation for x in lives])

        def echoed() -> None:
            self.heartbeat.echoed(seq, time.monotonic_ns())

        self._controller.echo(lambda: self._soon(echoed))

    def _begin(self, targets: Mapping[int, str]) -> Round:
        now = time.monotonic_ns()
        ping, sends = self._pings.begin(targets, now, ns(self._timing.ping))
        for send in sends:
            self._controller.send(send.incarnation, send.message)
        return ping

    def _end(self, ping: Round) -> None:
        alive = {x.incarnation for x in self._crew.lives()}  # who has answered may be dead by now
        for incarnation, (rtt_ms, _) in ping.answers.items():
            if incarnation in alive:
                self.ping_ms[incarnation] = round(rtt_ms, 3)
        for incarnation in ping.waiting:
            self.ping_ms.pop(incarnation, None)
        future = self._futures.pop(ping.seq, None)
        if future is not None:
            future.set_result(ping)

    def _look(self, now_ns: int) -> list[Hang]:
        """At what the kernel says of each process."""
        suspects = self.heartbeat.suspects()
        seen: dict[int, Vitals] = {}
        for life in self._crew.lives():
            if not life.pid or life.state is State.STOPPING:  # that has a deadline of its own
                self.heartbeat.forget(life.incarnation)
                continue
            vitals = read_vitals(life.pid, every_thread=life.incarnation in suspects)
            if vitals is not None:
                seen[life.incarnation] = vitals
        return self.heartbeat.look(seen, now_ns)

    def _overdue(self, now_ns: int) -> list[Hang]:
        """At how long each worker's forwards have been under way."""
        hangs = []
        for replica in self._crew.fleet:
            life = replica.life
            reader = self._readers.get(life.incarnation)
            if reader is None or life.reaped:
                continue
            for work in reader.read():
                block, limit_ms = replica.limit(work.stage)
                if now_ns - work.started_ns > (limit_ms or UNBOUNDED_MS) * 1_000_000 + _GRACE_NS:
                    took = (now_ns - work.started_ns) / 1e9
                    text = f"hung: a forward of {block} has not ended in {took:.1f} s"
                    hangs.append(Hang(life.incarnation, text))
                    break
        return hangs

    def _unreachable(self, now_ns: int) -> list[Hang]:
        """Workers whose socket file somebody has removed. Who is connected goes on; but nobody new
        can reach them: neither another Dispatcher nor a worker that takes another's place."""
        lost: dict[int, int] = {}
        for replica in self._crew.fleet:
            life = replica.life
            if life.reaped or life.state not in SERVING or not life.endpoint.startswith("ipc://"):
                continue
            file = life.endpoint.removeprefix("ipc://")
            # Where the whole folder is gone, a successor would fare no better.
            if not os.path.exists(file) and Path(file).parent.is_dir():
                lost[life.incarnation] = self._lost_ns.get(life.incarnation, now_ns)
        self._lost_ns = lost
        text = "nobody can reach it: its socket file was removed"
        return [
            Hang(incarnation, text, outside=True)
            for incarnation, since_ns in lost.items()
            if now_ns - since_ns >= _LOST_NS
        ]
