"""Turns: a worker's two threads take turns at its data socket.

While there is nothing to compute, the engine thread listens itself: what comes is computed by the
very thread that has received it, and its result is sent by that thread, too. A tensor crosses no
thread on its way through a worker; each crossing would cost a wake-up, 50 to 100 us. While the
engine thread computes, the data thread reads the socket in its stead, so that queues, deadlines and
policies are served meanwhile. It is woken only if something comes: the engine thread arms the data
thread's epoll, which costs a microsecond, and not the thread. Jobs of the engine thread, which may
take seconds (another number of threads opens a session anew), are treated as forwards are.

On a device the engine thread only orders the work, and goes on with the next batch. A result that
has to come to the host first is sent by the thread that hears of its landing.

A worker with several lanes has a thread for each further one. They never listen: whoever holds the
lock when something can run beside what runs, gives it to a lane that rests, and wakes it. Who has
computed goes on with the next batch itself.

Sockets and books are used under one lock, which the engine thread gives up to compute and both give
up to sleep. Both sleep on the socket's file descriptor. ZeroMQ signals it once per change, so
whoever is going to sleep has read everything there is before, or has been left no room for it: then
whoever makes room wakes the reader.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from zmq import zmq_poll

from blockflow.worker.executor import Executor
from blockflow.worker.ticket import Batch

NEVER_NS = 1 << 63
_BURST = 64
"""Messages read in one go before finished work is looked after again."""
_SHORT_S = 0.05
"""Of a longer sleep a millisecond more is nothing."""
_SELECT_FDS = 1024
"""``select`` takes no higher descriptors."""
_NOBLOCK = int(zmq.NOBLOCK)


class Computes(Protocol):
    """What :class:`Turns` needs of the runner."""

    def compute(self, batch: Batch) -> None: ...

    def compute_beside(self, batch: Batch) -> None: ...

    def sent(self) -> None: ...


class WatchedSockets:
    """The data thread's epoll, as :class:`~blockflow.tensormq.push.PushCache` wants a poller."""

    def __init__(self) -> None:
        self.epoll = select.epoll()

    def hear(self, bell: int) -> None:
        """Wake up each time that this descriptor rings. Who has emptied a mailbox before the bell
        of its last item rang would find it ringing, and nothing there, until the next one came."""
        self.epoll.register(bell, select.EPOLLIN | select.EPOLLET)

    def register(self, socket: zmq.Socket[bytes], flags: int) -> None:
        """Wake up when something changes at ``socket``; what, ``flush`` finds out by trying."""
        self.epoll.register(int(socket.get(zmq.FD)), select.EPOLLIN)

    def unregister(self, socket: zmq.Socket[bytes]) -> None:
        self.epoll.unregister(int(socket.get(zmq.FD)))


class Turns:
    """The loops of the engine thread and of further lanes, and the data thread's way to sleep.

    Args:
        pull: the data socket.
        watched: the data thread's epoll; its other descriptors are registered by the caller.
        executor, runner: what all threads work on.
        wake: wakes the data thread.
    """

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        watched: WatchedSockets,
        executor: Executor,
        runner: Computes,
        wake: Callable[[], None],
    ) -> None:
        self.lock = threading.Lock()
        self._pull = pull
        self._line = [(pull, int(zmq.POLLIN))]
        self._executor = executor
        self._runner = runner
        self._wake = wake
        self._fd = int(pull.get(zmq.FD))
        self._data = watched.epoll
        self._data.register(self._fd, 0)
        self._data_until_ns = NEVER_NS
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._engine = select.epoll()
        self._engine.register(self._bell, select.EPOLLIN)
        self._engine.register(self._fd, select.EPOLLIN)
        self._hears = True
        self._more = False  # something may wait in the socket that it does not signal any more
        self._data_hears = False
        self.engaged = False
        """The engine thread is at a batch, or a job: the data thread reads in its stead."""
        self._rests = False  # the engine thread sleeps, and may be given a batch
        self._until_ns = NEVER_NS
        self._mine: Batch | None = None
        self._resting = 0  # further lanes that may be given one
        self._given: deque[Batch] = deque()
        self._work = threading.Condition(self.lock)
        self._jobs: deque[Callable[[], None]] = deque()
        self._paused = self._closing = False
        self.attentive = False
        """The data thread wants to know of every batch that is done (it drains, or stops)."""

    # --- the engine thread -----------------------------------------------------------------------

    def serve(self) -> None:
        """Compute what comes, until :meth:`close`."""
        with self.lock:
            while not self._closing:
                batch, self._mine = self._mine, None
                if batch is None:
                    # Not before what was given: its deadline has been looked at, and a job may be
                    # long. It is given only to who rests, so jobs have their turn after it.
                    while self._jobs:
                        self._engage(self._aside, self._jobs.popleft())
                    batch = self._next()
                if batch is not None:
                    self._engage(self._compute, batch, self._runner.compute)
                    continue
                self._disengage()
                if self.attentive and self._executor.idle:
                    self._wake()
                self._listen()
            self._disengage()

    def _next(self) -> Batch | None:
        return None if self._paused else self._executor.step(time.monotonic_ns())

    def _engage(self, work: Callable[..., None], *given: Any) -> None:
        """Do ``work`` while the data thread listens, and lanes that rest go on. It listens on, from
        one to the next, until :meth:`_disengage`."""
        if self._resting:
            self._spread()
        if not self._executor.full:
            if not self._data_hears:
                self._data.modify(self._fd, select.EPOLLIN)
                self._data_hears = True
            if self._more:
                self._wake()
        self.engaged = True
        work(*given)

    def _disengage(self) -> None:
        """There is nothing more to do: the engine thread listens itself."""
        self.engaged = False
        if self._data_hears:
            self._data_hears = False
            self._data.modify(self._fd, 0)

    def _compute(self, batch: Batch, run: Callable[[Batch], None]) -> None:
        executor = self._executor
        self._aside(run, batch)
        if batch.landing:
            executor.ordered(batch)  # unless it has landed already
        else:
            executor.computed(batch)
        self._runner.sent()
        if self.attentive:
            self._wake()

    def _listen(self) -> None:
        """Read what is there, or sleep until something comes or is due."""
        executor = self._executor
        deaf = self._paused or executor.full
        if not deaf and self.receive():
            return
        if self._hears is deaf:
            self._hears = not deaf
            self._engine.modify(self._fd, 0 if deaf else select.EPOLLIN)
        executor.accounts.settle()
        due = None if self._paused else executor.next_wake_ns()  # then it starts nothing
        until = self._until_ns = due or NEVER_NS
        self._rests = True
        self.lock.release()
        try:
            events = sleep(self._engine, until)
        finally:
            self.lock.acquire()
            self._rests = False
        for fd, _ in events:
            if fd == self._bell:
                os.eventfd_read(self._bell)
            elif not self._paused:
                self.receive()  # at once: a sender's clock is running

    def _aside(self, work: Callable[..., Any], *given: Any) -> None:
        """Do ``work`` without the lock; what is due meanwhile is for the data thread."""
        if self.next_wake_ns() < self._data_until_ns:
            self._wake()
        self.lock.release()
        try:
            work(*given)
        finally:
            self.lock.acquire()

    # --- further lanes ---------------------------------------------------------------------------

    def lend(self) -> None:
        """Compute what is given to a further lane, until :meth:`close`; in a thread of its own."""
        with self.lock:
            self._resting += 1
            self._spread()  # something may have waited for this lane
            self._read_on()
            self._hand_over()
            while True:
                while not self._given and not self._closing:
                    self._work.wait()
                if not self._given:
                    return
                batch: Batch | None = self._given.popleft()
                while batch is not None:
                    self._compute(batch, self._runner.compute_beside)
                    batch = self._next()
                    if batch is not None:
                        self._spread()
                    self._read_on()  # what starts leaves the inbox
                self._resting += 1
                self._hand_over()

    def _spread(self) -> None:
        """Start what can run beside what runs, in lanes that rest."""
        while (self._resting or self._rests) and not self._paused:
            batch = self._executor.step(time.monotonic_ns())
            if batch is None:
                return
            if self._resting:
                self._resting -= 1
                self._given.append(batch)
                self._work.notify()
            else:
                self._rests = False
                self._mine = batch
                self.poke()

    def _hand_over(self) -> None:
        """This lane rests. What is due next, a missing slot say, is for a thread that may sleep too
        long: it did not know of it."""
        self._executor.accounts.settle()
        due = self.next_wake_ns()
        if self._rests:
            if due < self._until_ns:
                self.poke()
        elif due < self._data_until_ns:
            self._wake()

    def _read_on(self) -> None:
        """A batch has made room: who had stopped reading the socket goes on."""
        if self._executor.full:
            return
        if not self.engaged:
            if not self._hears:
                self.poke()
        elif (self._more or not self._data_hears) and not self._paused:
            self._data_hears = True
            self._data.modify(self._fd, select.EPOLLIN)
            self._wake()  # ZeroMQ has signalled what waits there before

    # --- the device's thread ---------------------------------------------------------------------

    def landed(self, batch: Batch) -> None:
        """Send what a device has computed and copied to the host, in the thread that was told so:
        another one would first have to be woken."""
        with self.lock:
            if self._closing:
                return
            self._executor.computed(batch)
            if self.attentive:
                self._wake()
            self._spread()
            self._read_on()
            self._hand_over()

    # --- all, with the lock ----------------------------------------------------------------------

    def receive(self) -> bool:
        """Read what is there, a burst at most, as far as the inbox has room; True when anything
        was.

        Whatever the messages hold, this goes on.
        """
        pull, executor = self._pull, self._executor
        for n in range(_BURST):
            self._more = executor.full
            if self._more or not zmq_poll(self._line, 0):
                return n > 0
            header = last = pull.recv(_NOBLOCK, copy=False)
            now = time.monotonic_ns()
            frame: Any | None = None
            if header.more:
                frame = last = pull.recv(_NOBLOCK, copy=False)
                while last.more:  # nobody sends a third frame
                    last = pull.recv(_NOBLOCK, copy=False)
                    frame = b""
            executor.receive(header.bytes, frame, now)
        self._more = True  # whoever goes to sleep next reads on
        return True

    # --- the data thread, with the lock ----------------------------------------------------------

    def rest(self, until_ns: int) -> None:
        """Sleep until something happens, ``until_ns`` at the latest; then read the socket if it is
        this thread's turn."""
        at_once = self._more and self.engaged and not self._paused and not self._executor.full
        self._data_until_ns = until_ns
        self.lock.release()
        try:
            sleep(self._data, 0 if at_once else until_ns)
        finally:
            self.lock.acquire()
        if self.engaged and not self._paused:
            if self._executor.full:
                self._data.modify(self._fd, 0)
                self._data_hears = False
            else:
                self.receive()

    def meanwhile(self, now: int) -> None:
        """What is due while others are at work: expiry, and batches for lanes that rest."""
        self._executor.expire(now)
        self._spread()
        if not self._data_hears:
            self._read_on()  # who has expired or started has left room

    def next_wake_ns(self) -> int:
        """When :meth:`meanwhile` or the executor's time-outs are due at the latest."""
        executor = self._executor
        if self._paused:
            due = executor.next_overdue_ns()
        elif self._resting or self._rests:
            due = executor.next_wake_ns()
        else:  # whoever is at a batch, or a job, looks for the next one himself
            due = executor.next_late_ns()
        return due or NEVER_NS

    def poke(self) -> None:
        """Something has changed: the engine thread shall look whether there is work now."""
        os.eventfd_write(self._bell, 1)

    def later(self, job: Callable[[], None]) -> None:
        """Do ``job`` in the engine thread, between two batches and without the lock."""
        self._jobs.append(job)
        self.poke()

    def pause(self) -> None:
        """Start no more batches and read nothing more."""
        self._paused = True
        if self._data_hears:  # or each further message would wake who does not read it
            self._data_hears = False
            self._data.modify(self._fd, 0)
        self.poke()

    def close(self) -> None:
        """End :meth:`serve` and :meth:`lend` after the running batches."""
        self._closing = self._paused = True
        self._work.notify_all()
        self.poke()

    def release(self) -> None:
        """Close the descriptors; all threads are done with them."""
        self._engine.close()
        os.close(self._bell)


def sleep(epoll: select.epoll, until_ns: int) -> list[tuple[int, int]]:
    """Sleep until ``epoll`` has something to tell, ``until_ns`` at the latest; what it tells.

    It counts whole milliseconds, upwards: as long again as a short window of a policy. ``select``
    counts microseconds, and waits for an epoll as for any descriptor.
    """
    if until_ns >= NEVER_NS:
        return epoll.poll()
    left_s = max(0.0, (until_ns - time.monotonic_ns()) / 1e9)
    if 0 < left_s < _SHORT_S and epoll.fileno() < _SELECT_FDS:
        select.select((epoll,), (), (), left_s)
        left_s = 0
    return epoll.poll(left_s)
