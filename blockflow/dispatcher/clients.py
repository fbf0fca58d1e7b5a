"""ClientPort: the ROUTER that clients connect to, and what is owed to slow ones."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import zmq

SLOW_CLIENT_BYTES = 8 * 1024 * 1024
"""A client that lets more replies than this pile up is given up."""

SLOW_CLIENT_NS = 2_000_000_000
"""... and so is one that takes nothing for this long."""


_LOCAL_PEERS = ("localhost:", "127.", "::1", "::ffff:127.")


class Sent(Enum):
    """What became of a reply."""

    YES = "sent"
    LATER = "waits for the client to read"
    GONE = "no such client"
    SLOW = "the client is given up"


def receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """The frames of the next message, not copied; empty when there is none now.

    ``recv_multipart`` asks the socket whether more follows (20 us a message); the frame knows.
    """
    try:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return []
    frames = [frame]
    while frame.more:
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        frames.append(frame)
    return frames


def is_local(frame: zmq.Frame) -> bool:
    """Whether a client's message came from this host, by the transport's word.

    ZeroMQ gives the peer's address for tcp and ``localhost:uid:gid:pid`` for ipc.
    """
    try:
        peer = str(frame.get("Peer-Address"))
    except zmq.ZMQError:  # the transport does not say
        return False
    return peer.startswith(_LOCAL_PEERS)


@dataclass(slots=True)
class Backlog:
    """Replies that a client's connection would not take yet."""

    since_ns: int
    nbytes: int = 0
    messages: deque[list[Any]] = field(default_factory=deque)


class ClientPort:
    """Receives requests and sends replies; used from the Dispatcher's thread alone.

    Args:
        socket: a bound ROUTER with ROUTER_MANDATORY and a finite SNDHWM.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._backlogs: dict[bytes, Backlog] = {}

    def receive(self) -> tuple[bytes, list[zmq.Frame]] | None:
        """(client, its frames) of the next message, or None when there is none now."""
        frames = receive_frames(self.socket)
        return (frames[0].bytes, frames[1:]) if frames else None

    def send(self, client: bytes, frames: Sequence[Any], now_ns: int) -> Sent:
        """Send ``frames`` to ``client``; never waits, keeps the order per client."""
        backlog = self._backlogs.get(client)
        if backlog is None:
            sent = self._try(client, frames)
            if sent is not Sent.LATER:
                return sent
            backlog = self._backlogs[client] = Backlog(now_ns)
        backlog.messages.append(list(frames))
        backlog.nbytes += sum(len(f) for f in frames)
        if self._hopeless(backlog, now_ns):
            self.forget(client)
            return Sent.SLOW
        return Sent.LATER

    def flush(self, now_ns: int) -> list[tuple[bytes, Sent]]:
        """Try what waits once more; returns the clients that are gone or given up."""
        lost: list[tuple[bytes, Sent]] = []
        for client, backlog in list(self._backlogs.items()):
            sent = Sent.YES
            while backlog.messages:
                sent = self._try(client, backlog.messages[0])
                if sent is not Sent.YES:
                    break
                backlog.nbytes -= sum(len(f) for f in backlog.messages.popleft())
                backlog.since_ns = now_ns
            if sent is Sent.YES:
                del self._backlogs[client]
            elif sent is Sent.GONE or self._hopeless(backlog, now_ns):
                del self._backlogs[client]
                lost.append((client, Sent.GONE if sent is Sent.GONE else Sent.SLOW))
        return lost

    def forget(self, client: bytes) -> None:
        """Throw away what waits for ``client``. ZeroMQ cannot cut a single ROUTER peer off."""
        self._backlogs.pop(client, None)

    def waiting(self) -> int:
        """Clients with a backlog: call :meth:`flush` while there are any."""
        return len(self._backlogs)

    def backlog_bytes(self) -> int:
        return sum(b.nbytes for b in self._backlogs.values())

    def close(self) -> None:
        self._backlogs.clear()
        self.socket.close()

    @staticmethod
    def _hopeless(backlog: Backlog, now_ns: int) -> bool:
        # One message may be larger than the bound: a lone one is bounded by the message limit.
        return (
            len(backlog.messages) > 1 and backlog.nbytes > SLOW_CLIENT_BYTES
        ) or now_ns - backlog.since_ns > SLOW_CLIENT_NS

    def _try(self, client: bytes, frames: Sequence[Any]) -> Sent:
        socket = self.socket
        try:
            # Only the first part can be refused: after it, the message is the peer's as a whole.
            socket.send(client, zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return Sent.LATER
        except zmq.ZMQError as exc:
            if exc.errno == errno.EHOSTUNREACH:
                return Sent.GONE
            raise
        last = len(frames) - 1
        for i, frame in enumerate(frames):
            flags = zmq.NOBLOCK if i == last else zmq.NOBLOCK | zmq.SNDMORE
            socket.send(frame, flags, copy=False)  # pyzmq copies small ones all the same
        return Sent.YES
