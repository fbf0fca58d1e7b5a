"""Turns: a worker's two threads take turns at its data socket.

While there is nothing to compute, the engine thread listens itself: what comes is computed by the
very thread that has received it, and its result is sent by that thread, too. A tensor crosses no
thread on its way through a worker; each crossing would cost a wake-up, 50 to 100 us. While the
engine thread computes, the data thread reads the socket in its stead, so that queues, deadlines and
policies are served meanwhile. It is woken only if something comes: the engine thread arms the data
thread's epoll, which costs a microsecond, and not the thread.

Sockets and books are used under one lock, which the engine thread gives up to compute and both give
up to sleep. Both sleep on the socket's file descriptor. ZeroMQ signals it once per change, so
whoever is going to sleep has read everything there is before.
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

from blockflow.worker.executor import Executor
from blockflow.worker.ticket import Batch

NEVER_NS = 1 << 63
_BURST = 64
"""Messages read in one go before finished work is looked after again."""
_NOBLOCK = int(zmq.NOBLOCK)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class Computes(Protocol):
    """What :class:`Turns` needs of the runner."""

    def compute(self, batch: Batch) -> None: ...


class WatchedSockets:
    """The data thread's epoll, as :class:`~blockflow.tensormq.push.PushCache` wants a poller."""

    def __init__(self) -> None:
        self.epoll = select.epoll()

    def register(self, socket: zmq.Socket[bytes], flags: int) -> None:
        """Wake up when something changes at ``socket``; what, ``flush`` finds out by trying."""
        self.epoll.register(int(socket.get(zmq.FD)), select.EPOLLIN)

    def unregister(self, socket: zmq.Socket[bytes]) -> None:
        self.epoll.unregister(int(socket.get(zmq.FD)))


class Turns:
    """The engine thread's loop, and the data thread's way to sleep.

    Args:
        pull: the data socket.
        watched: the data thread's epoll; its other descriptors are registered by the caller.
        executor, runner: what both threads work on.
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
        self._jobs: deque[Callable[[], None]] = deque()
        self._paused = self._closing = False
        self.attentive = False
        """The data thread wants to know of every batch that is done (it drains, or stops)."""

    # --- the engine thread -----------------------------------------------------------------------

    def serve(self) -> None:
        """Compute what comes, until :meth:`close`."""
        with self.lock:
            while not self._closing:
                while self._jobs:
                    self._aside(self._jobs.popleft())
                batch = None if self._paused else self._executor.step(time.monotonic_ns())
                if batch is not None:
                    self._compute(batch)
                    continue
                if self.attentive and self._executor.idle:
                    self._wake()
                self._listen()

    def _compute(self, batch: Batch) -> None:
        executor = self._executor
        if (executor.next_wake_ns() or NEVER_NS) < self._data_until_ns:
            self._wake()
        if not executor.full:
            self._data.modify(self._fd, select.EPOLLIN)
        self._aside(lambda: self._runner.compute(batch))
        executor.computed(batch)
        self._data.modify(self._fd, 0)
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
        until = executor.next_wake_ns() or NEVER_NS
        self.lock.release()
        try:
            events = self._engine.poll(timeout_s(until))
        finally:
            self.lock.acquire()
        for fd, _ in events:
            if fd == self._bell:
                os.eventfd_read(self._bell)
            elif not self._paused:
                self.receive()  # at once: a sender's clock is running

    def _aside(self, work: Callable[[], Any]) -> None:
        """Do ``work`` without the lock."""
        self.lock.release()
        try:
            work()
        finally:
            self.lock.acquire()

    # --- both, with the lock ---------------------------------------------------------------------

    def receive(self) -> bool:
        """Read what is there, a burst at most; True when anything was.

        Whatever the messages hold, this goes on.
        """
        pull, executor = self._pull, self._executor
        for n in range(_BURST):
            if executor.full or not int(pull.get(_EVENTS)) & _POLLIN:
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
        self._wake()  # there may be more: the data thread looks, if nobody else does
        return True

    # --- the data thread, with the lock ----------------------------------------------------------

    def rest(self, until_ns: int) -> None:
        """Sleep until something happens, ``until_ns`` at the latest; then read the socket if it is
        this thread's turn."""
        self._data_until_ns = until_ns
        self.lock.release()
        try:
            self._data.poll(timeout_s(until_ns))
        finally:
            self.lock.acquire()
        if self._executor.busy and not self._paused:
            if self._executor.full:
                self._data.modify(self._fd, 0)
            else:
                self.receive()

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
        self.poke()

    def close(self) -> None:
        """End :meth:`serve` after the running batch."""
        self._closing = self._paused = True
        self.poke()

    def release(self) -> None:
        """Close the descriptors; both threads are done with them."""
        self._engine.close()
        os.close(self._bell)


def timeout_s(until_ns: int) -> float | None:
    """Seconds until then, 0 at least; None = for ever."""
    if until_ns >= NEVER_NS:
        return None
    return max(0.0, (until_ns - time.monotonic_ns()) / 1e9)
