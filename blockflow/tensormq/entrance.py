"""Entrance: who may keep a tcp connection to a data socket, which anybody on the machine can make.

Who is none of this system's does not get through the handshake, where there are keys, but has a
descriptor of this process until then. So a peer has some seconds for it. And when it is for the
last descriptors, those that cannot be through it go, the oldest first; a process that has none left
can do nothing any more, and may end.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import zmq

from blockflow.tensormq.monitoring import read_event
from blockflow.tensormq.tcp_peers import TcpPeers, last_descriptor

HANDSHAKE_MS = 5000
"""A peer has so long for it, then libzmq ends its connection. It takes milliseconds."""

_GREETING = 64
HANDSHAKE_BYTES: dict[int, int] = {
    zmq.NULL: _GREETING + 28,  # READY with the socket's type
    zmq.CURVE: _GREETING + 202 + 259,  # HELLO; INITIATE without what it says of the socket
}
"""The shortest handshake of one that connects, by ZMTP 3.1 and CurveZMQ (RFC 37, 26)."""

_AT_ONCE = 2
"""So many are ended for each that comes: else what has gone over the bound would stay there."""

_LOG = logging.getLogger("blockflow.tensormq")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A connection that may still be in its handshake.

    Attributes:
        mark: what the kernel calls it, and no other before or after it.
    """

    fd: int
    mark: int
    at_ns: int


class Looks(Protocol):
    """What :class:`Doorkeeper` needs of :class:`~blockflow.tensormq.tcp_peers.TcpPeers`."""

    def came(self, fd: int) -> int | None: ...

    def brought(self, fd: int, mark: int) -> int | None: ...

    def shut(self, fd: int, mark: int) -> bool: ...

    def used(self) -> int | None: ...


class Doorkeeper:
    """Decides who goes, connection by connection.

    Args:
        peers: looks at them and shuts them down.
        last_fd: so many descriptors may be in use with theirs.
        handshake: bytes that a peer has brought at least when it is through it.

    Attributes:
        turned_away: connections that were ended because descriptors were short.
    """

    def __init__(self, peers: Looks, last_fd: float, handshake: int) -> None:
        self._peers = peers
        self._last_fd = last_fd
        self._handshake = handshake
        self._arrivals: deque[Arrival] = deque()
        self.turned_away = 0

    def on_accepted(self, fd: int, now_ns: int) -> None:
        """libzmq has accepted a connection."""
        mark = self._peers.came(fd)
        if mark is None:
            return
        self._arrivals.append(Arrival(fd, mark, now_ns))
        late_ns = now_ns - HANDSHAKE_MS * 1_000_000
        while self._arrivals[0].at_ns < late_ns:  # it is through its handshake, or is no more
            self._arrivals.popleft()
        used = self._peers.used()
        if used is None:  # the kernel does not count them, and lends the lowest that is free
            if fd > self._last_fd:
                self.turned_away += self._peers.shut(fd, mark)
            return
        if used <= self._last_fd:
            return
        gone = 0
        for silent in self._silent():
            gone += self._peers.shut(silent.fd, silent.mark)
            if gone == _AT_ONCE:
                break
        self.turned_away += gone or self._peers.shut(fd, mark)

    def _silent(self) -> Iterator[Arrival]:
        """Those that cannot be through their handshake, the oldest first; who can is never asked
        about again."""
        while self._arrivals:
            arrival = self._arrivals.popleft()
            brought = self._peers.brought(arrival.fd, arrival.mark)
            if brought is not None and brought < self._handshake:
                yield arrival


def watch_entrance(
    ctx: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], endpoint: str
) -> None:
    """Have a thread keep the entrance of ``sock``, a data socket that is bound to ``endpoint``; it
    ends with the socket.

    Raises:
        zmq.ZMQError, OSError, RuntimeError: no descriptor, memory or thread is left for it.
    """
    peers = TcpPeers(int(endpoint.rpartition(":")[2]))
    try:
        handshake = HANDSHAKE_BYTES[int(sock.get(zmq.MECHANISM))]
        keeper = Doorkeeper(peers, last_descriptor(), handshake)
        # A shadow: destroying the context must not close the thread's socket under its feet.
        events = zmq.Context(shadow=ctx).socket(zmq.PAIR)
        try:
            events.set(zmq.LINGER, 0)
            address = f"inproc://entrance-{secrets.token_hex(8)}"
            sock.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
            events.connect(address)
            threading.Thread(
                target=_run, args=(events, peers, keeper), name="bf-entrance", daemon=True
            ).start()
        except BaseException:
            sock.disable_monitor()
            events.close(0)
            raise
    except BaseException:
        peers.close()
        raise


def _run(events: zmq.Socket[bytes], peers: TcpPeers, keeper: Doorkeeper) -> None:
    """libzmq waits for whoever reads its events: nothing but its own end may end this."""
    told = 0
    try:
        while True:
            event, value = read_event(events.recv_multipart())
            if event == zmq.EVENT_MONITOR_STOPPED:
                return
            try:
                keeper.on_accepted(value, time.monotonic_ns())
            except Exception:
                _LOG.exception("a connection could not be looked at")
            if keeper.turned_away >= 2 * told + 1:  # the 1st, 3rd, 7th ...: no flood
                told = keeper.turned_away
                _LOG.warning(
                    "descriptors are short: %d connections to the data socket that were not "
                    "through their handshake were ended so far",
                    told,
                )
    except zmq.ContextTerminated:
        pass
    except zmq.ZMQError:
        _LOG.exception("nobody looks after the connections to the data socket any more")
    finally:
        events.close(0)
        peers.close()
