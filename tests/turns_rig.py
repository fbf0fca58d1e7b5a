"""A worker's threads, each run by hand: which one goes on, and when, is the test's choice.

The turns, the data thread's loop, the executor and its policies are the real ones. The threads are
real, too, but only one moves at a time: each stands still wherever it has no lock, and goes on when
it is told to. Clock, socket, engine and the sending side are models. The socket's descriptor tells
of a change once, as ZeroMQ's does: only to a reader that has found nothing before.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
import torch
import zmq
from lanes_rig import LATE, Bench

from blockflow.core.routing import merge_paths
from blockflow.tensormq.agent import Mailbox
from blockflow.wire import control
from blockflow.wire.data import Item
from blockflow.worker import executor as executor_module
from blockflow.worker import turns as turns_module
from blockflow.worker import worker as worker_module
from blockflow.worker.intake import Arrival
from blockflow.worker.parts import Wake
from blockflow.worker.ticket import Batch, Source, Ticket
from blockflow.worker.turns import NEVER_NS, Turns, WatchedSockets
from blockflow.worker.worker import Worker

WAIT_S = 20.0
SPIN = 200
"""Nobody has to go on so often without anything new from outside."""


class Thread:
    """One of the worker's, which stands still until :meth:`go`.

    Attributes:
        at: "born", "asleep", "woken" (and without the lock yet), "rests" (a lane without a batch),
            "computes", "job", or "ended".
        until_ns, epoll: of one that sleeps.
        rung: a lane is to take a batch.
    """

    def __init__(self, target: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
        self.at = "born"
        self.until_ns = NEVER_NS
        self.epoll: Any = None
        self.rung = self.aborts = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._told, self._stood = threading.Semaphore(0), threading.Semaphore(0)
        self._work = target, args
        self._thread = threading.Thread(target=self._life, daemon=True)

    def begin(self) -> None:
        self._thread.start()
        assert self._stood.acquire(timeout=WAIT_S)

    def _life(self) -> None:
        target, args = self._work
        try:
            self.stand("born")
            self.result = target(*args)
        except BaseException as exc:
            self.error = exc
        self.at = "ended"
        self._stood.release()

    def stand(self, at: str) -> None:
        """Called by the thread itself, without the lock."""
        self.at = at
        self._stood.release()
        self._told.acquire()
        if self.aborts:
            raise SystemExit

    def go(self) -> None:
        """Go on to where it stands still next."""
        self._told.release()
        assert self._stood.acquire(timeout=WAIT_S), f"it went on from {self.at!r} and hangs"
        if self.error is not None and not self.aborts:
            raise self.error


class Bell:
    """The lanes' condition."""

    def __init__(self, rig: Rig, lock: threading.Lock) -> None:
        self._rig, self._lock = rig, lock
        self._waiting: deque[Thread] = deque()

    def wait(self) -> None:
        me = self._rig.me
        self._waiting.append(me)
        self._lock.release()
        try:
            me.stand("rests")
        finally:
            self._lock.acquire()

    def notify(self) -> None:
        if self._waiting:
            self._waiting.popleft().rung = True

    def notify_all(self) -> None:
        while self._waiting:
            self.notify()


class Frame:
    def __init__(self, data: bytes, more: bool) -> None:
        self.bytes, self.more = data, more


class Line:
    """The data socket: a PULL one whose descriptor is edge-triggered."""

    def __init__(self) -> None:
        self.frames: deque[Frame] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._found_empty = True

    def get(self, option: int) -> int:
        assert option == zmq.FD
        return self.fd

    def poll(self) -> bool:
        if select.select([self.fd], [], [], 0)[0]:
            os.eventfd_read(self.fd)
        self._found_empty = not self.frames
        return not self._found_empty

    def recv(self, flags: int, *, copy: bool) -> Frame:
        assert flags == zmq.NOBLOCK and not copy
        if not self.frames:
            raise zmq.Again
        return self.frames.popleft()

    def send(self, *frames: bytes) -> None:
        last = len(frames) - 1
        self.frames += [Frame(f, i < last) for i, f in enumerate(frames)]
        if self._found_empty:
            self._found_empty = False
            os.eventfd_write(self.fd, 1)


class Rig(Bench):
    """A worker that serves: ``engine`` and ``data`` are its threads, ``lanes`` further ones.

    Args:
        patch: undone by the caller.
        lands: the engine is a device: it only orders, and :meth:`land` ends a batch.
        inbox, burst: rows that may wait, and messages read in one go.
        more: of :class:`Bench`.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        lands: bool = False,
        inbox: int = 4096,
        burst: int = 64,
        **more: Any,
    ) -> None:
        super().__init__(patch, **more)
        names = {"Lock": threading.Lock, "Condition": lambda lock: Bell(self, lock)}
        patch.setattr(turns_module, "threading", SimpleNamespace(**names))
        patch.setattr(turns_module, "time", self.clock)
        patch.setattr(turns_module, "sleep", self._sleep)
        patch.setattr(turns_module, "zmq_poll", lambda line, _: line[0][0].poll())
        patch.setattr(turns_module, "_BURST", burst)
        patch.setattr(executor_module, "INBOX_ROWS", inbox)
        patch.setattr(worker_module, "time", self.clock)
        patch.setattr(worker_module, "threading", SimpleNamespace(Thread=self._lane))
        self.lands = lands
        self.landing: list[Batch] = []
        self.line, self.watched = Line(), WatchedSockets()
        self.mail: Mailbox[Any] = Mailbox()
        self.watched.hear(self.mail.fileno())
        self.arrivals: dict[int, Arrival] = {}
        self.frame_of: dict[int, Any] = {}
        self.told: list[Any] = []
        self.jobs: list[str] = []
        self.unsent = self.flushed = 0
        self.long_jobs = False  # they do not end by themselves
        self._keys = count(1)
        self._letters = count()
        self._of: dict[int, Thread] = {}
        cast(Any, self.executor)._intake = SimpleNamespace(take=self._take)
        self.runner = runner = SimpleNamespace(
            compute=lambda batch: self._compute(batch, at_home=True),
            compute_beside=lambda batch: self._compute(batch, at_home=False),
            sent=lambda: None,
            set_threads=lambda n: None,
            widen=lambda n: None,
            threads=1,
            concurrent=True,
        )
        pull = cast(Any, self.line)
        self.turns = Turns(pull, self.watched, self.executor, runner, lambda: self.mail.put(Wake()))
        self.worker = worker = Worker.__new__(Worker)
        worker._launch = cast(
            Any, SimpleNamespace(stages=[s.spec for s in self.stages.values()], incarnation=7)
        )
        worker._agent = cast(Any, SimpleNamespace(send=self.told.append))
        worker._begin = cast(Any, SimpleNamespace(set=lambda: None))
        worker._mailbox, worker._lanes = self.mail, []
        worker._loaded, worker._state = None, "ready"
        worker._drain_asked = worker._stopping = False
        parts = SimpleNamespace(
            executor=self.executor,
            scheduler=self.scheduler,
            turns=self.turns,
            runner=runner,
            push=SimpleNamespace(pending=lambda: self.unsent, flush=self._flush),
            delivery=SimpleNamespace(routes=SimpleNamespace(version=3)),
        )
        self.engine = self._thread(self.turns.serve)
        self.data = self._thread(worker._serve, parts)

    # --- the threads -----------------------------------------------------------------------------

    def _thread(self, target: Callable[..., Any], *args: Any) -> Thread:
        thread = Thread(target, args)
        thread.begin()
        self._of[cast(int, thread._thread.ident)] = thread
        return thread

    def _lane(self, *, target: Any, args: Any, name: str, daemon: bool) -> Any:
        return SimpleNamespace(start=lambda: self._thread(target, *args))

    @property
    def all(self) -> list[Thread]:
        return list(self._of.values())

    @property
    def lanes(self) -> list[Thread]:
        return [t for t in self.all if t is not self.engine and t is not self.data]

    @property
    def me(self) -> Thread:
        return self._of[threading.get_ident()]

    def _flush(self) -> None:
        self.flushed += 1

    def _sleep(self, epoll: Any, until_ns: int) -> Any:
        me = self.me
        me.epoll, me.until_ns = epoll, until_ns
        me.stand("asleep")
        return epoll.poll(0)

    def _compute(self, batch: Batch, *, at_home: bool) -> None:
        assert (self.me is self.engine) == at_home, "a lane has pools of its own"
        batch.compute_from_ns, batch.compute_to_ns = self.clock.now, self.clock.now + 1
        batch.result = torch.cat([t.source.tensor() for t in batch.tickets])
        if self.lands:
            batch.landing = True
            self.landing.append(batch)
        self.me.stand("computes")

    def awake(self, thread: Thread) -> bool:
        """Whether it goes on without anything else."""
        if thread.at == "asleep":
            rung = select.select([thread.epoll], [], [], 0)[0]  # which leaves it to the thread
            return thread.until_ns <= self.clock.now or bool(rung)
        if thread.at == "job":
            return not self.long_jobs
        return thread.at == "born" or (thread.at == "rests" and thread.rung)

    def go(self, thread: Thread) -> None:
        """One step of one thread; what it computed is done."""
        thread.rung = False
        thread.go()

    def settle(self, pick: Callable[[list[Thread]], Thread] = lambda awake: awake[0]) -> None:
        """Let all go on until everyone computes, or sleeps with nothing to wake it."""
        for _ in range(SPIN):
            awake = [t for t in self.all if self.awake(t)]
            if not awake:
                return
            self.go(pick(awake))
        raise AssertionError(f"it does not come to rest: {[(t.at, t.until_ns) for t in awake]}")

    def land(self, batch: Batch) -> None:
        """What a device's thread does: its output is on the host."""
        self.landing.remove(batch)
        self.turns.landed(batch)

    # --- what comes from outside -----------------------------------------------------------------

    def send(self, *path: int, deadline: int = LATE) -> int:
        """A request of one row for ``path``; its key."""
        key = next(self._keys)
        tree, _ = merge_paths([path])
        item = Item(key.to_bytes(16, "big"), 1, 1, tree, 0, 1, 1000)
        self.sink.keys[item.request_id] = key
        source = Source("float32", (2,), 1, tensor=torch.full((1, 2), float(key)))
        ticket = Ticket(key, item, path[0], source, 0, 0, 0, 0, deadline, 0)
        self._post(Arrival([ticket]))
        return key

    def withdraw(self, *keys: int) -> None:
        self._post(Arrival(withdrawn=tuple((k.to_bytes(16, "big"), 1) for k in keys)))

    def _post(self, arrival: Arrival) -> None:
        number = next(self._letters)
        self.arrivals[number] = arrival
        self.line.send(b"%d" % number)

    def _take(self, header: bytes, frame: Any, now: int) -> Arrival:
        number = int(header)
        self.frame_of[number] = frame
        arrival = self.arrivals.pop(number)
        for ticket in arrival.tickets:
            ticket.arrival_ns = ticket.received_ns = now
        return arrival

    def tell(self, message: control.ControlMessage) -> None:
        self.mail.put(message)

    def job(self, name: str = "") -> None:
        """Something long for the engine thread."""

        def work() -> None:
            self.me.stand("job")
            self.jobs.append(name)

        self.turns.later(work)

    def answered(self) -> list[int]:
        return sorted([k for keys in self.sink.sent for k in keys] + list(self.sink.failed))

    def close(self) -> None:
        for thread in self.all:
            thread.aborts = True
            while thread.at != "ended":
                thread.go()
        self.turns.release()
        self.watched.epoll.close()
        self.mail.close()
        os.close(self.line.fd)


class SlowRig(Rig):
    """Between any two steps something may happen: who wakes up has the lock later, and what is put
    into the mailbox is in it before its bell rings."""

    unrung = 0

    def _sleep(self, epoll: Any, until_ns: int) -> Any:
        events = super()._sleep(epoll, until_ns)
        self.me.stand("woken")
        return events

    def awake(self, thread: Thread) -> bool:
        return thread.at == "woken" or super().awake(thread)

    def tell(self, message: control.ControlMessage) -> None:
        self.mail._items.append(message)
        self.unrung += 1

    def ring(self) -> None:
        if self.unrung:
            self.unrung -= 1
            os.eventfd_write(self.mail.fileno(), 1)


R = TypeVar("R", bound=Rig)


def serving(**how: Any) -> AbstractContextManager[Rig]:
    """A worker whose threads have just come to rest, with nothing to do."""
    return serving_by(Rig, **how)


@contextmanager
def serving_by(kind: type[R], **how: Any) -> Iterator[R]:
    """The same with a rig of this kind."""
    with pytest.MonkeyPatch.context() as patch:
        rig = kind(patch, **how)
        try:
            rig.settle()
            yield rig
        finally:
            rig.close()
