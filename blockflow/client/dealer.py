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

import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from blockflow.core import limits
from blockflow.tensormq.curve import Protect
from blockflow.tensormq.sockets import bound_frames, watch_peer

FIRST_NS = 50_000_000
LONGEST_NS = 1_000_000_000
"""From one attempt to connect to the next, at least: the first time, and at the most."""

_NEVER_MS = 3_600_000
"""-1, ZeroMQ's word for it, would have it take the queue away as IMMEDIATE does."""

_HANDSHAKE_MS = 5000

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


_DESCRIPTORS = 20
"""A client has ten, and pyzmq's collector of arrays, which begins with the first large tensor of a
process, seven."""


def check_descriptors(one: int) -> None:
    """Whether so many are free: where there are too few, libzmq ends the process (``epoll.cpp``).

    Args:
        one: any descriptor, to be copied.

    Raises:
        OSError: they are not.
    """
    free: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            free.append(os.dup(one))
    finally:
        for fd in free:
            os.close(fd)


def look_up(address: str) -> tuple[bool, str]:
    """Whether the socket is to be made ready for IPv6 (as ``tensormq.sockets.is_v6``), and what is
    wrong with the host's name; '' = nothing, as far as one look tells.

    It may wait for a name server. libzmq looks again at each attempt, and says nothing of it.
    """
    if not address.startswith("tcp://"):
        return False, ""
    host = address.removeprefix("tcp://").rpartition(":")[0]
    if host.startswith("["):
        return True, ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False, f"no address was found for the name {host!r}"
    return all(family == socket.AF_INET6 for family, *_ in found), ""


class Redial:
    """When to connect again. Pure.

    The time between attempts doubles, and a part of it is chance: the clients of a Dispatcher that
    has ended shall not all come back at the same moment.

    Args:
        chance: gives a number in [0, 1).

    Attributes:
        due_ns: when; None: there is no need to.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self.due_ns: int | None = None
        self._chance = chance
        self._wait_ns = FIRST_NS

    def failed(self, now_ns: int) -> None:
        """The connection has ended, or there was none; said again, it means the same end."""
        if self.due_ns is None:
            self.due_ns = now_ns + int(self._wait_ns * (1 + self._chance()))
            self._wait_ns = min(2 * self._wait_ns, LONGEST_NS)

    def succeeded(self) -> None:
        """There is a connection."""
        self.due_ns, self._wait_ns = None, FIRST_NS

    def is_due(self, now_ns: int) -> bool:
        return self.due_ns is not None and self.due_ns <= now_ns

    def dialled(self) -> None:
        """It is being tried: due again once that has failed."""
        self.due_ns = None


class Dealer:
    """The DEALER towards a Dispatcher, connecting from the start, and its monitor.

    Args:
        context: of the socket.
        address: ``tcp://host:port`` or ``ipc://path``.
        protect: sets CURVE up.

    Attributes:
        socket: to be polled, and to send on.
        monitor: to be polled: then there are :meth:`events`.
        trouble: what is wrong with the address's host, '' = nothing known.

    Raises:
        zmq.ZMQError, UnicodeError: the address is none.
    """

    def __init__(
        self, context: zmq.Context[Any], address: str, protect: Protect | None = None
    ) -> None:
        s = context.socket(zmq.DEALER)
        if protect is not None:
            protect(s)
        v6, self.trouble = look_up(address)
        s.setsockopt(zmq.IPV6, v6)
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
        self._address = address
        s.connect(address)

    def receive(self) -> list[Any] | None:
        """The frames of the next message, None when there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def events(self) -> Iterator[tuple[int, int]]:
        """What has become of connections meanwhile: ``zmq.EVENT_...`` and their values."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            yield int(event["event"]), int(event["value"])

    def hang_up(self) -> None:
        """Drop the connection, ended or not, with what it has not sent."""
        with suppress(zmq.ZMQError):  # it is dropped already
            self.socket.disconnect(self._address)

    def dial(self) -> None:
        """Connect, in place of any other connection."""
        self.hang_up()
        self.socket.connect(self._address)

    def close(self, linger_ms: int) -> None:
        """What was sent before has so long to leave."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
