"""A ClientPort whose socket is made up, and whose clients' connections are real ones."""

from __future__ import annotations

import errno
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from blockflow.dispatcher.clients import TRACKED_BYTES, ClientPort, Sent

A, B = b"\0" + (1).to_bytes(4), b"\0" + (2).to_bytes(4)
"""As ZeroMQ names its peers, in this order."""
LARGE = bytes(TRACKED_BYTES)
MS = 1_000_000


class Tracker:
    """Of a large frame."""

    done = False


class Frame:
    """One that has come on a descriptor."""

    def __init__(self, content: bytes, more: bool, fd: int) -> None:
        self.bytes, self.more, self._fd = content, more, fd

    def __len__(self) -> int:
        return len(self.bytes)

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD
        return self._fd


class Router:
    """Peers in ``gone`` are not there; those in ``room`` take so many more messages."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.room: dict[bytes, int] = {}
        self.sent: list[list[bytes]] = []
        self.trackers: list[Tracker] = []
        self.inbox: deque[Frame] = deque()
        self.events: deque[list[bytes]] = deque()
        self._inside = False

    def send(self, part: Any, flags: int, copy: bool = True, track: bool = False) -> Tracker | None:
        if not self._inside:
            if part in self.gone:
                raise zmq.ZMQError(errno.EHOSTUNREACH)
            if self.room.get(part) == 0:
                raise zmq.Again
            if part in self.room:
                self.room[part] -= 1
            self.sent.append([])
        self.sent[-1].append(bytes(part))
        self._inside = bool(flags & zmq.SNDMORE)
        if not track:
            return None
        self.trackers.append(Tracker())
        return self.trackers[-1]

    def recv(self, flags: int, copy: bool) -> Frame:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def poll(self, timeout: int) -> int:
        return len(self.inbox)

    def get_monitor_socket(self, events: int) -> Monitor:
        return Monitor(self.events)

    def disable_monitor(self) -> None:
        """Nothing is to be undone."""

    close = disable_monitor

    def said(self, client: bytes, fd: int, *frames: bytes) -> None:
        parts = [client, *(frames or (b"hello",))]
        self.inbox += [Frame(p, i < len(parts), fd) for i, p in enumerate(parts, 1)]

    def event(self, kind: int, fd: int) -> None:
        self.events.append([struct.pack("=hi", kind, fd), b""])


class Monitor:
    def __init__(self, events: deque[list[bytes]]) -> None:
        self._events = events

    def poll(self, timeout: int) -> int:
        return len(self._events)

    def recv_multipart(self, flags: int) -> list[bytes]:
        return self._events.popleft()

    def close(self, linger: int) -> None:
        """Nothing is to be undone."""


class Scene:
    """A port, and connections to it that the kernel knows."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.router = Router()
        path = str(folder / "clients.sock")
        self._stack = stack
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(path)
        self._listener.listen()
        self.port = ClientPort(cast(Any, self.router), [f"ipc://{path}"])
        stack.callback(self.port.close)
        self.peers: dict[int, socket.socket] = {}

    def accepted(self) -> int:
        """A descriptor of a new connection."""
        peer = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        peer.settimeout(5)
        peer.connect(self._listener.getsockname())
        fd = self._stack.enter_context(self._listener.accept()[0]).fileno()
        self.peers[fd] = peer
        self.router.event(zmq.EVENT_ACCEPTED, fd)
        return fd

    def ended(self, fd: int, now_ns: int = 0) -> list[tuple[bytes, Sent]]:
        """ZeroMQ says so; what :meth:`flush` makes of it."""
        self.router.event(zmq.EVENT_DISCONNECTED, fd)
        self.port.on_departures(now_ns)
        return self.port.flush(now_ns)

    def heard(self, client: bytes, fd: int, now_ns: int = 0) -> bool:
        """It has said something; whether anybody is told."""
        self.router.said(client, fd)
        return self.port.receive(now_ns) is not None

    def send(self, client: bytes, *frames: bytes, now_ns: int = 0) -> Sent:
        return self.port.send(client, frames, now_ns)

    def sent(self) -> list[tuple[bytes, ...]]:
        """Messages, without the large frames' content."""
        found = [tuple(b"L" if f == LARGE else f for f in m) for m in self.router.sent]
        self.router.sent.clear()
        return found


@pytest.fixture
def s(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, stack)


# --- debts ----------------------------------------------------------------------------------------
