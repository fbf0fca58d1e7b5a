"""What the kernel says of connections by their descriptors, which belong to ZeroMQ."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_SPARE_DESCRIPTORS = 256
"""So many are not for clients' connections; of a small limit, a quarter."""

_INFO_BYTES = 136
_ACKED, _RECEIVED = slice(120, 128), slice(128, 136)
"""``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of ``struct tcp_info`` (linux/tcp.h), since
Linux 4.1."""

_NO_LINGER = struct.pack("ii", 1, 0)
_SO_COOKIE = 57
"""Of ``getsockopt`` (asm-generic/socket.h), since Linux 4.6; Python has no name for it."""

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None)


def last_descriptor() -> float:
    """The highest descriptor that a client's connection may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    return soft - min(_SPARE_DESCRIPTORS, soft // 4)


def mark(fd: int) -> int | None:
    """What the kernel calls the socket behind a descriptor, and no other before or after it (its
    *cookie*); None when there is no socket."""
    cookie = ctypes.c_uint64()
    size = ctypes.c_uint(ctypes.sizeof(cookie))
    at = ctypes.byref(cookie)
    if _LIBC.getsockopt(fd, socket.SOL_SOCKET, _SO_COOKIE, at, ctypes.byref(size)) != 0:
        return None
    return cookie.value


def bytes_received(fd: int) -> int | None:
    """What a TCP connection has brought so far; None when it is none, or the kernel is too old."""
    return _counted(fd, _RECEIVED)


def bytes_taken(fd: int) -> int | None:
    """What the peer of a TCP connection has acknowledged so far; None as above."""
    return _counted(fd, _ACKED)


def _counted(fd: int, field: slice) -> int | None:
    # By the C library: a socket object would ask the kernel four times more, and close the
    # descriptor when it is collected.
    info = ctypes.create_string_buffer(_INFO_BYTES)
    size = ctypes.c_uint(_INFO_BYTES)
    if _LIBC.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)) != 0:
        return None
    return int.from_bytes(info.raw[field], sys.byteorder) if size.value == _INFO_BYTES else None


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

    def turn_away(self, fd: int) -> bool:
        """Shut down a connection that has just been accepted, if it came by TCP.

        Returns:
            Whether it did.
        """
        return self._shut(fd, tcp_only=True)  # no copy: there may be no descriptor for one

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
                # When ZeroMQ closes it, it is reset: a peer that does not read, or writes on, would
                # keep the kernel's half of it for minutes.
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
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
