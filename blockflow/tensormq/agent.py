"""ControlAgent: a process's line to the Controller, and the lifeline that ends it with its manager.

One thread owns the DEALER. It answers Ping by itself, so that a long inference or a busy data
thread never looks dead; every other message is handed on. Workers and the Dispatcher use it alike.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import zmq

from blockflow.core import limits
from blockflow.core.errors import WireError
from blockflow.core.text import worth_a_line
from blockflow.tensormq.sockets import connect_dealer
from blockflow.wire.control import (
    ControlMessage,
    Ping,
    Pong,
    Stats,
    Stop,
    decode_control,
    encode_control,
)

_LOG = logging.getLogger("blockflow.agent")

LIFELINE_ENV = "BLOCKFLOW_LIFELINE_FD"
"""Number of the inherited read end of the guardian's pipe; unset = no lifeline (tests, by hand)."""

ORPHAN_STATUS = 70
"""Exit status of a process that ended because its lifeline was cut."""

_OUTBOX_LIMIT = 1000
_STOPS = frozenset({signal.SIGTERM, signal.SIGINT})
_SIGNALS_AT_ONCE = 64

T = TypeVar("T")


def lifeline_from_environment() -> int | None:
    """The lifeline's descriptor as the launcher announced it, or None."""
    text = os.environ.get(LIFELINE_ENV, "")
    return int(text) if text.isdecimal() else None


class Mailbox(Generic[T]):
    """A queue into a thread that sleeps in a poller: ``put`` from anywhere, ``drain`` by its owner.

    No lock is taken, so ``put`` is also safe in a signal handler. The descriptor (:meth:`fileno`)
    is readable while something may be waiting.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Queue ``item`` and wake the owner. After :meth:`close` the item is dropped."""
        self._items.append(item)
        fd = self._fd
        if fd >= 0:
            try:
                os.eventfd_write(fd, 1)
            except OSError:  # closed at the same moment: nobody listens any more
                self._items.clear()

    def drain(self) -> list[T]:
        """Take everything, in order; clears the wake-up first, so that no item is overlooked."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        out: list[T] = []
        while True:
            try:
                out.append(self._items.popleft())
            except IndexError:
                return out

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class ControlAgent:
    """Control thread of a worker or the Dispatcher.

    Args:
        endpoint: the Controller's ROUTER (``ipc://...``).
        incarnation: of this process; its decimal form is the DEALER's identity.
        on_message: gets every message, in the control thread: hand it on (for instance
            :meth:`Mailbox.put`) and return at once. Ping is answered already; the main loop says
            with :meth:`heard` that it has seen it.
        state: what Pong reports; called in the control thread.
        on_orphaned: the manager is dead. Called in the control thread: remove this process's arena
            and socket files; the process then ends by ``os._exit``, whatever other threads do.
        lifeline_fd: read end of the manager's pipe, see :func:`lifeline_from_environment`.
        context: of this process.

    The owner's life with it: ``stop_by_signals()``, ``start()``, ``send(Hello(...))``, ...,
    ``close()``.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        incarnation: int,
        on_message: Callable[[ControlMessage], None],
        state: Callable[[], str],
        on_orphaned: Callable[[], None],
        lifeline_fd: int | None = None,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._on_message = on_message
        self._state = state
        self._on_orphaned = on_orphaned
        self._lifeline_fd = lifeline_fd
        self._context = context
        self._outbox: Mailbox[ControlMessage | None] = Mailbox()
        self._unsent: deque[bytes] = deque()
        self._thread = threading.Thread(target=self._run, name="bf-control", daemon=True)
        self._heard = 0
        self._signals: tuple[int, int] | None = None
        self.signalled = False
        """A signal has told it to stop, and not the Controller."""
        self.malformed = 0
        self.dropped = 0

    def stop_by_signals(self) -> None:
        """SIGTERM and SIGINT become a Stop for ``on_message``; called by the main thread, before
        ``start``.

        The handlers themselves do nothing: Python runs them only when the main thread comes back to
        its code, and if a signal arrives just before the main loop goes to sleep, that is whenever
        something else wakes it. The interpreter writes the signal's number into a pipe at once, and
        on that the control thread sleeps.
        """
        self._signals = ends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(ends[1], warn_on_full_buffer=False)
        for number in _STOPS:
            signal.signal(number, lambda *_: None)

    def start(self) -> None:
        """Connect and begin to answer."""
        self._thread.start()

    def send(self, msg: ControlMessage) -> None:
        """Queue a message to the Controller; from any thread, never blocks.

        While the Controller is away messages wait; of those beyond a bound, Stats are dropped (the
        next ones replace them).
        """
        if isinstance(msg, Stats) and len(self._outbox) + len(self._unsent) >= _OUTBOX_LIMIT:
            self.dropped += 1
            return
        self._outbox.put(msg)

    def heard(self, seq: int) -> None:
        """The main loop has seen Ping ``seq``: it is alive, as the next Pong will say."""
        self._heard = seq

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued (at most a second is spent on it), end the thread. Idempotent."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._outbox.put(None)
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._outbox.close()
            if self._signals is not None:
                signal.set_wakeup_fd(-1)
                for end in self._signals:
                    os.close(end)
                self._signals = None

    # --- the control thread

    def _run(self) -> None:
        sock = connect_dealer(
            self._context,
            self._endpoint,
            str(self._incarnation),
            max_bytes=limits.MAX_CONTROL_BYTES,
        )
        try:
            self._loop(sock)
        except zmq.ContextTerminated:
            pass
        finally:
            sock.close()

    def _loop(self, sock: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(sock, zmq.POLLIN)
        poller.register(self._outbox.fileno(), zmq.POLLIN)
        if self._lifeline_fd is not None:
            poller.register(self._lifeline_fd, zmq.POLLIN)
        signals = None if self._signals is None else self._signals[0]
        if signals is not None:
            poller.register(signals, zmq.POLLIN)
        closing = False
        while not closing:
            # With messages that the socket would not take, wake up to try again.
            events = dict(poller.poll(100 if self._unsent else None))
            if self._lifeline_fd in events and self._lifeline_cut():
                self._die_orphaned()
            if signals in events and self._stop_signalled():
                self.signalled = True
                self._hand_on(Stop())
            if self._outbox.fileno() in events:
                for msg in self._outbox.drain():
                    if msg is None:
                        closing = True
                    else:
                        self._unsent.append(encode_control(msg))
            if sock in events:
                self._receive(sock)
            self._flush(sock)

    def _receive(self, sock: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                msg = decode_control(frames[-1])
            except WireError as exc:
                self.malformed += 1
                if worth_a_line(self.malformed):
                    _LOG.warning("control message refused (%d so far): %s", self.malformed, exc)
                continue
            if isinstance(msg, Ping):
                pong = Pong(self._incarnation, msg.seq, self._state(), self._heard)
                self._unsent.append(encode_control(pong))
            self._hand_on(msg)

    def _hand_on(self, msg: ControlMessage) -> None:
        try:
            self._on_message(msg)
        except Exception:
            # A defect in a handler must not silence the pings: the process would be killed.
            _LOG.exception("handler of %s failed", type(msg).__name__)

    def _flush(self, sock: zmq.Socket[bytes]) -> None:
        while self._unsent:
            try:
                sock.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._unsent.popleft()

    def _stop_signalled(self) -> bool:
        """Whether a signal that has come means a Stop; others have written as well."""
        return self._signals is not None and not _STOPS.isdisjoint(
            os.read(self._signals[0], _SIGNALS_AT_ONCE)
        )

    def _lifeline_cut(self) -> bool:
        """True at end of file; bytes are nobody's message and are thrown away."""
        fd = self._lifeline_fd
        if fd is None:
            return False
        try:
            return os.read(fd, 4096) == b""  # readable or hung up: this cannot block
        except OSError:
            return True

    def _die_orphaned(self) -> None:
        _LOG.error("the control plane is gone; incarnation %d ends", self._incarnation)
        try:
            self._on_orphaned()
        except Exception:
            _LOG.exception("clean-up after the manager's death failed")
        finally:
            os._exit(ORPHAN_STATUS)
