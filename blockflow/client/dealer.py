"""Dealer: a client's socket, which connects when its owner says so, and when that should be.

ZeroMQ would connect again by itself, and does not do so here, for it knows two ways of that:

- with IMMEDIATE it takes the ended connection's queue away whenever it comes to know of the end. If
  the first frame of a message has been read by then and the second has not, that is the end of the
  whole process (``fq.cpp``: ``Assertion failed: !_more``); one look at its commands in every
  hundred frames is enough for that while replies come in a burst;
- without, what the ended connection has not taken is sent on the next one: to a Dispatcher that may
  be another one, and beside what the core sends again.

So an ended connection stays as it is until its owner has read what had come on it, and drops it,
between two messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import zmq

from blockflow.client.conduct import MOST_FRAMES
from blockflow.client.names import names_a_host
from blockflow.core import limits
from blockflow.tensormq.curve import Protect
from blockflow.tensormq.monitoring import read_event
from blockflow.tensormq.sockets import bound_frames, watch_peer

FIRST_NS = 50_000_000
LONGEST_NS = 1_000_000_000
"""From one attempt to connect to the next, at least: the first time, and at the most."""

_NEVER_MS = 3_600_000
"""-1, ZeroMQ's word for it, would have it take the queue away as IMMEDIATE does."""

_HANDSHAKE_MS = 5000

_FRAMES_AT_ONCE = 1000
_NOBLOCK = int(zmq.NOBLOCK)

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Redial:
    """When to connect again. Pure.

    The time between attempts doubles, and a part of it is chance: the clients of a Dispatcher that
    has ended shall not all come back at the same moment.

    Args:
        chance: gives a number in [0, 1).

    Attributes:
        due_ns: when; None: there is no need to.
        until_ns: the attempt under way is given up then; None: there is none, or it ends by itself.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self.due_ns: int | None = None
        self.until_ns: int | None = None
        self._chance = chance
        self._wait_ns = FIRST_NS

    def failed(self, now_ns: int) -> None:
        """The connection has ended, or there was none; said again, it means the same end."""
        self.until_ns = None
        if self.due_ns is None:
            self.due_ns = now_ns + int(self._wait_ns * (1 + self._chance()))
            self._wait_ns = min(2 * self._wait_ns, LONGEST_NS)

    def moves_on(self, now_ns: int) -> None:
        """The attempt has failed, and the next one is by another address: it does not wait longer
        than the first."""
        self.until_ns = None
        if self.due_ns is None:
            self.due_ns = now_ns + int(FIRST_NS * (1 + self._chance()))

    def offended(self, now_ns: int) -> None:
        """The connection was given up, for what came on it: the next one can wait."""
        self._wait_ns = LONGEST_NS
        self.failed(now_ns)

    def succeeded(self) -> None:
        """There is a connection."""
        self.due_ns, self.until_ns, self._wait_ns = None, None, FIRST_NS

    def is_due(self, now_ns: int) -> bool:
        return self.due_ns is not None and self.due_ns <= now_ns

    def is_overdue(self, now_ns: int) -> bool:
        return self.until_ns is not None and self.until_ns <= now_ns

    def dialled(self, until_ns: int | None = None) -> None:
        """It is being tried, or is on its way: due again once that has failed."""
        self.due_ns, self.until_ns = None, until_ns


class Dealer:
    """The DEALER towards a Dispatcher and its monitor. It connects from the start, unless the host
    has to be looked up first.

    Args:
        context: of the socket.
        address: ``tcp://host:port`` or ``ipc://path``.
        protect: sets CURVE up.

    Attributes:
        socket: to be polled, and to send on.
        monitor: to be polled: then there are :meth:`events`.
        endpoint: what it is connected to, or is connecting to; '' = nothing.

    Raises:
        zmq.ZMQError, UnicodeError: the address is none.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, protect: Protect | None = None
    ) -> None:
        s = context.socket(zmq.DEALER)
        if protect is not None:
            protect(s)
        s.setsockopt(zmq.LINGER, 0)
        s.setsockopt(zmq.SNDTIMEO, 0)
        bound_frames(s, limits.MAX_MESSAGE_BYTES)
        s.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        s.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if address.startswith("tcp://"):  # the kernel tells of the end of a unix socket's peer
            watch_peer(s)
        # A high-water mark and heartbeats together can end this process (tensormq/sockets.py). What
        # may come is bounded by what was asked for.
        s.setsockopt(zmq.RCVHWM, 0)
        self.socket = s
        self.monitor = s.get_monitor_socket(_EVENTS)
        self.endpoint = ""
        self._polled = [(s, int(zmq.POLLIN))]
        self._begun: list[Any] = []
        if not names_a_host(address):
            self.dial(address)

    @property
    def waits(self) -> bool:
        """There is something to receive. To ask costs a third of an attempt that finds nothing."""
        return bool(zmq.zmq_poll(self._polled, 0))

    def receive(self) -> list[Any] | None:
        """The frames of the next message, None when there is none.

        Of a message with more than any has not all are kept, and they are read so many at a time:
        [] until the last one was.
        """
        recv, frames = self.socket.recv, self._begun
        try:
            for _ in range(_FRAMES_AT_ONCE):
                frame = recv(_NOBLOCK, copy=False)
                if len(frames) <= MOST_FRAMES:
                    frames.append(frame)
                if not frame.more:
                    self._begun = []
                    return frames
        except zmq.Again:
            return None
        return []

    def events(self) -> Iterator[tuple[int, int]]:
        """What has become of the connection meanwhile: ``zmq.EVENT_...`` and their values; not what
        became of one that was dropped."""
        while self.monitor.poll(0):
            event = read_event(self.monitor.recv_multipart())
            if self.endpoint:
                yield event

    def hang_up(self) -> None:
        """Drop the connection, ended or not, with what it has not sent."""
        endpoint, self.endpoint = self.endpoint, ""
        if endpoint:  # what it does not find, libzmq would look up, and keep the interpreter for it
            with suppress(zmq.ZMQError):
                self.socket.disconnect(endpoint)

    def dial(self, endpoint: str) -> None:
        """Connect to it, whose host is a number, in place of any other connection."""
        self.hang_up()
        # Only where it is needed: with it IPv4 addresses would be mapped to IPv6 ones.
        self.socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
        self.socket.connect(endpoint)
        self.endpoint = endpoint

    def close(self, linger_ms: int) -> None:
        """What was sent before has so long to leave."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
