"""GrantDesk: hands segments of memory to clients of this host, over a unix socket of its own.

ZeroMQ cannot carry descriptors, so a client that wants to share memory asks on its ZeroMQ
connection for an invitation, connects to the unix socket that it names, and shows the token that it
got. That ties the two together: only who received the token is that client. The kernel says which
user the other end is; other users are not served. A client's segments live as long as its side
connection, which the kernel closes with the process.

Everything here runs in the Dispatcher's thread and waits for nothing: a peer that does not read or
does not speak is closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.grants import MIN_TENSOR_BYTES, Grant, GrantBook
from blockflow.tensormq.grants_memory import Segment, unsupported
from blockflow.wire.client import TOKEN_BYTES, Place
from blockflow.wire.grants import Ask, Attach, Granted, Refused, decode_from_client, encode_side

_LOG = logging.getLogger("blockflow.dispatcher")

TOKEN_NS = 2_000_000_000
"""How long an invitation holds, and how long a connection may stay silent about whose it is."""

_PAUSE_NS = 1_000_000_000
_STRANGERS = 16
_TOKENS = 64
_AT_ONCE = 8
_BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")
_SHARE_OF_MEMORY = 4
_SHARE_OF_DESCRIPTORS = 4
_MOST_DESCRIPTORS = 4096


@dataclass(slots=True)
class _Side:
    """A side connection; ``client`` is b'' until it has shown a token."""

    connection: socket.socket
    client: bytes = b""


class GrantDesk:
    """Segments, and the side connections that they live with.

    Args:
        path: of the unix socket, in a private directory.
        poller: gets the descriptors to watch; whoever polls calls :meth:`on_event` for them.
        book: decides.

    Attributes:
        reason: why nothing is granted at all; '' when something may be.
        events: what went wrong: ``malformed``, ``refused``, ``silent``.
    """

    def __init__(self, path: Path, poller: zmq.Poller, book: GrantBook | None = None) -> None:
        self._path = path
        self._poller = poller
        self.events: Counter[str] = Counter()
        self._book = book or GrantBook(max_bytes=_most_bytes())
        self._most_descriptors = _most_descriptors()
        self._segments: dict[int, Segment] = {}
        self._sides: dict[int, _Side] = {}
        self._strangers: dict[int, int] = {}
        self._of_client: dict[bytes, int] = {}
        self._tokens: dict[bytes, tuple[bytes, int]] = {}
        self._listener: socket.socket | None = None
        self._resume_ns: int | None = None
        self.reason = unsupported()
        if not self.reason:
            self._listen(path)

    # --- what the data path asks

    def upload(self, client: bytes, where: tuple[int, int], nbytes: int) -> memoryview:
        """What the client has put into its slot. It may change while it is read: copy it once.

        Raises:
            RequestError: CONNECTION_LOST or INVALID_REQUEST, see the book.
        """
        number, slot = where
        self._book.check_upload(client, number, slot, nbytes)
        return self._segments[number].slot(slot, nbytes)

    def place(self, client: bytes, part: memoryview | np.ndarray[Any, Any]) -> Place | None:
        """Copy a result into a slot of the client, an array row by row whatever its strides; None:
        send it in the message."""
        if part.nbytes < MIN_TENSOR_BYTES or client not in self._book:
            return None
        place = self._book.reserve(client, part.nbytes, lambda n: self._segments[n].marks)
        if place is not None:
            slot = self._segments[place.grant].slot(place.slot, part.nbytes)
            if isinstance(part, memoryview):
                slot[:] = part
            else:
                np.ndarray(part.shape, part.dtype, slot)[...] = part
        return place

    def take_back(self, client: bytes, place: Place) -> None:
        """What was placed there is not sent after all."""
        self._book.take_back(client, place)

    def client_gone(self, client: bytes) -> None:
        """The client is given up: its segments and its invitation with it."""
        self._withdraw(client)
        fd = self._of_client.get(client)
        if fd is not None:
            self._close_side(fd)

    def invite(self, client: bytes, now_ns: int) -> tuple[str, bytes, str]:
        """(path, token, reason): the way to the side socket, or why there is none."""
        self.tick(now_ns)
        reason = self.reason or self._book.full()
        if not reason and len(self._tokens) >= _TOKENS:
            reason = "too many clients ask for shared memory at this moment"
        if reason:
            return "", b"", reason
        token = secrets.token_bytes(TOKEN_BYTES)
        self._withdraw(client)
        self._tokens[token] = client, now_ns + TOKEN_NS
        return str(self._path), token, ""

    # --- events

    def watches(self, source: object) -> bool:
        """Whether ``source`` is one of this desk's descriptors."""
        return source in self._sides or (
            self._listener is not None and source == self._listener.fileno()
        )

    def on_event(self, fd: int, now_ns: int) -> None:
        """A descriptor is readable: a bounded piece of work."""
        if fd in self._sides:
            self._serve(fd)
        elif self._listener is not None:
            self._accept(self._listener, now_ns)

    def next_due(self) -> int | None:
        """When :meth:`tick` has work; None = never."""
        first = next(iter(self._strangers.values()), None)  # they come in the order of time
        return self._resume_ns if first is None else min(first, self._resume_ns or first)

    def tick(self, now_ns: int) -> None:
        """Drop tokens and connections that nobody has used in time."""
        if self._tokens:
            self._tokens = {t: v for t, v in self._tokens.items() if v[1] > now_ns}
        for fd in [f for f, due_ns in self._strangers.items() if due_ns <= now_ns]:
            self._refuse_side(fd, "silent")
        resume = self._resume_ns
        if self._listener is not None and resume is not None and resume <= now_ns:
            self._resume_ns = None
            self._poller.register(self._listener.fileno(), zmq.POLLIN)

    def gauges(self) -> dict[str, int | dict[str, int]]:
        """Clients, segments and bytes granted now, and :attr:`events`."""
        return {
            "clients": self._book.clients,
            "segments": len(self._segments),
            "bytes": self._book.nbytes,
            "events": dict(self.events),
        }

    def close(self) -> None:
        """Close all connections and remove the socket file. Idempotent."""
        for fd in list(self._sides):
            self._close_side(fd)
        if self._listener is not None:
            if self._resume_ns is None:
                self._poller.unregister(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    # --- inside

    def _withdraw(self, client: bytes) -> None:
        self._tokens = {t: v for t, v in self._tokens.items() if v[0] != client}

    def _listen(self, path: Path) -> None:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        try:
            listener = socket.socket(socket.AF_UNIX, kind)
        except OSError as exc:
            self.reason = f"no side socket: {exc.strerror}"
            return
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        except OSError as exc:  # the system serves without it
            listener.close()
            self.reason = f"no side socket: {exc.strerror}"
            _LOG.warning("clients cannot share memory: %s", self.reason)
            return
        self._listener = listener
        self._poller.register(listener.fileno(), zmq.POLLIN)

    def _accept(self, listener: socket.socket, now_ns: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                # No descriptor is free. The listener stays readable: look away for a while.
                self.events["refused"] += 1
                _LOG.warning("a side connection was not taken: %s", exc.strerror)
                self._poller.unregister(listener.fileno())
                self._resume_ns = now_ns + _PAUSE_NS
                return
            full = len(self._strangers) >= _STRANGERS or not self._spare_descriptor()
            if full or not _same_user(connection):
                self.events["refused"] += 1
                connection.close()
                continue
            connection.setblocking(False)
            fd = connection.fileno()
            self._sides[fd] = _Side(connection)
            self._strangers[fd] = now_ns + TOKEN_NS
            self._poller.register(fd, zmq.POLLIN)

    def _serve(self, fd: int) -> None:
        side = self._sides[fd]
        for _ in range(_AT_ONCE):
            try:
                packet = side.connection.recv(limits.MAX_HEADER_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._close_side(fd)
                return
            try:
                msg = decode_from_client(packet)
            except BlockFlowError:
                self._refuse_side(fd, "malformed")
                return
            if not (self._attach(fd, side, msg) if isinstance(msg, Attach) else self._ask(fd, msg)):
                return

    def _attach(self, fd: int, side: _Side, msg: Attach) -> bool:
        client, _ = self._tokens.pop(msg.token, (b"", 0))
        if not client or side.client:
            self._refuse_side(fd, "refused")
            return False
        self.client_gone(client)  # the client has begun anew: the latest connection counts
        if not self._book.attach(client):
            self._refuse_side(fd, "refused")
            return False
        side.client = client
        del self._strangers[fd]
        self._of_client[client] = fd
        return True

    def _ask(self, fd: int, ask: Ask) -> bool:
        side = self._sides[fd]
        if not side.client:
            self._refuse_side(fd, "malformed")
            return False
        grant: Grant | str = "the Dispatcher has no descriptor to spare"
        if self._spare_descriptor():
            grant = self._book.ask(side.client, ask.direction, ask.nbytes)
        if isinstance(grant, str):
            return self._tell(fd, Refused(ask.direction, ask.nbytes, grant), ())
        try:
            segment, memory = Segment.create(grant.slot_bytes, grant.slots)
        except OSError as exc:
            self._book.revoke(side.client, grant.number)
            reason = f"no memory file: {exc.strerror}"
            return self._tell(fd, Refused(ask.direction, ask.nbytes, reason), ())
        self._segments[grant.number] = segment
        try:
            offer = Granted(grant.number, ask.direction, grant.slot_bytes, grant.slots)
            return self._tell(fd, offer, (memory,))
        finally:
            os.close(memory)

    def _spare_descriptor(self) -> bool:
        """A connection costs one, and so does a segment: ``mmap`` keeps a copy of its own."""
        return len(self._sides) + len(self._segments) < self._most_descriptors

    def _tell(self, fd: int, msg: Granted | Refused, fds: tuple[int, ...]) -> bool:
        try:
            socket.send_fds(self._sides[fd].connection, [encode_side(msg)], fds)
        except OSError:  # it does not read, or is gone
            self._refuse_side(fd, "refused")
            return False
        return True

    def _refuse_side(self, fd: int, event: str) -> None:
        self.events[event] += 1
        self._close_side(fd)

    def _close_side(self, fd: int) -> None:
        side = self._sides.pop(fd)
        self._strangers.pop(fd, None)
        self._poller.unregister(fd)
        side.connection.close()
        if side.client:
            del self._of_client[side.client]
            for grant in self._book.detach(side.client):
                segment = self._segments.pop(grant.number, None)
                if segment is not None:
                    segment.close()


def _same_user(connection: socket.socket) -> bool:
    with contextlib.suppress(OSError, struct.error):
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(raw)[1]) == os.geteuid()
    return False


def _most_descriptors() -> int:
    """How many may be spent here: libzmq needs the others, and ends a process that has none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_DESCRIPTORS
    return min(_MOST_DESCRIPTORS, soft // _SHARE_OF_DESCRIPTORS)


def _most_bytes() -> int:
    """Bytes that may be granted on this machine."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return limits.MAX_GRANTED_BYTES
    return min(limits.MAX_GRANTED_BYTES, memory // _SHARE_OF_MEMORY)
