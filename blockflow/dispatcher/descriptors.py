"""What the kernel says of connections by their descriptors, which belong to ZeroMQ."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

from blockflow.dispatcher.debt import Tracker
from blockflow.tensormq.tcp_peers import (
    INFO_BYTES,
    NO_COOKIE,
    NO_LINGER,
    RECEIVED,
    SO_COOKIE,
    inode,
)

_ACKED = slice(120, 128)
"""``tcpi_bytes_acked`` of ``struct tcp_info`` (linux/tcp.h), since Linux 4.1."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None, use_errno=True)


def mark(fd: int) -> int | None:
    """What the kernel calls the socket behind a descriptor, and no other before or after it (its
    *cookie*, or its inode where a sandbox has none); None when there is no socket."""
    cookie = ctypes.c_uint64()
    size = ctypes.c_uint(ctypes.sizeof(cookie))
    at = ctypes.byref(cookie)
    if _LIBC.getsockopt(fd, socket.SOL_SOCKET, SO_COOKIE, at, ctypes.byref(size)) != 0:
        return inode(fd) if ctypes.get_errno() in NO_COOKIE else None
    return cookie.value


def bytes_received(fd: int) -> int | None:
    """What a TCP connection has brought so far; None when it is none, or the kernel is too old."""
    return _counted(fd, RECEIVED)


def bytes_taken(fd: int) -> int | None:
    """What the peer of a TCP connection has acknowledged so far; None as above."""
    return _counted(fd, _ACKED)


def _counted(fd: int, field: slice) -> int | None:
    # By the C library: a socket object would ask the kernel four times more, and close the
    # descriptor when it is collected.
    info = ctypes.create_string_buffer(INFO_BYTES)
    size = ctypes.c_uint(INFO_BYTES)
    if _LIBC.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)) != 0:
        return None
    return int.from_bytes(info.raw[field], sys.byteorder) if size.value == INFO_BYTES else None


class Sealed:
    """Of a frame that ZeroMQ encrypts: of that it says that it has written it when it has made the
    copy that is written.

    Args:
        written: ZeroMQ's word (``zmq.MessageTracker``).
        fd, expected: the connection that it goes by, and its mark.
        taken: bytes that the peer had acknowledged in all before it was sent.
        nbytes: of the frame.
        before: of the frame that is sent before it, if the peer does not have that yet.

    Attributes:
        until: so many bytes the peer has acknowledged when it has the frame, at the least: small
            frames and heartbeats are not counted.
    """

    def __init__(
        self,
        written: Tracker,
        fd: int,
        expected: int,
        taken: int,
        nbytes: int,
        before: Tracker | None,
    ) -> None:
        self._written = written
        self._fd = fd
        self._mark = expected
        if isinstance(before, Sealed) and before._mark == expected:
            taken = max(taken, before.until)
        self.until: int = taken + nbytes

    @property
    def plain(self) -> bool:
        """It is not encrypted yet."""
        return not self._written.done

    @property
    def done(self) -> bool:
        """The peer has it, or its connection is no more."""
        if self.plain:
            return False
        taken = bytes_taken(self._fd)
        return taken is None or taken >= self.until or mark(self._fd) != self._mark


class Doors:
    """Where clients come in: tells their connections from every other file of this process.

    Args:
        endpoints: as they are bound, ports resolved.
    """

    def __init__(self, endpoints: Iterable[str]) -> None:
        self._paths: set[str] = set()
        self._ports: set[int] = set()
        for endpoint in endpoints:
            kind, _, address = endpoint.partition("://")
            if kind == "ipc":
                self._paths.add(address)
            else:
                self._ports.add(int(address.rpartition(":")[2]))

    def shut(self, fd: int, expected: int) -> bool:
        """Shut a client's connection down, if ``expected`` still is the mark of what is behind its
        descriptor; anything else is left alone.

        That frees what ZeroMQ holds for it; the descriptor stays ZeroMQ's to close.

        Returns:
            Whether there was such a connection.
        """
        try:
            # A copy of the descriptor cannot become another connection while we look at it.
            copy = os.dup(fd)
        except OSError:
            return False
        try:
            return mark(copy) == expected and self._shut(copy, tcp_only=False)
        finally:
            os.close(copy)

    def turn_away(self, fd: int, expected: int) -> bool:
        """As :meth:`shut`, when descriptors are short, and only if it came by TCP."""
        # There may be no descriptor for a copy. Should it become another client's connection right
        # now, that one has just begun and connects again.
        return mark(fd) == expected and self._shut(fd, tcp_only=True)

    def _shut(self, fd: int, *, tcp_only: bool) -> bool:
        try:
            theirs = socket.socket(fileno=fd)
        except OSError:  # closed, or no socket
            return False
        try:
            local = theirs.family == socket.AF_UNIX
            if (local and tcp_only) or not self._leads_to(theirs):
                return False
            with suppress(OSError):  # it may have ended itself
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                theirs.shutdown(socket.SHUT_RDWR)
            return True
        finally:
            theirs.detach()  # its owner closes it

    def _leads_to(self, sock: socket.socket) -> bool:
        """Whether it is the near end of a client's connection."""
        name = sock.getsockname()
        if sock.family == socket.AF_UNIX:
            return name in self._paths
        return name[1] in self._ports


class OwnMemory:
    """Resident memory of this process without what it shares: arenas, segments, libraries."""

    def __init__(self) -> None:
        # Kept open: when descriptors are short there may be none to look with.
        self._file = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115

    def read(self) -> int:
        """Bytes."""
        self._file.seek(0)
        _, resident, shared = map(int, self._file.read().split()[:3])
        return (resident - shared) * _PAGE

    def close(self) -> None:
        self._file.close()
