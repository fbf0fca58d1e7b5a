"""What the kernel says of tcp connections to a port of this process, by descriptors that are
ZeroMQ's.

No look needs a further descriptor: it is for when there are none.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SPARE_DESCRIPTORS = 256
"""So many are not for connections that others make; of a small limit, a quarter."""

SO_COOKIE = 57
"""Of ``getsockopt`` (asm-generic/socket.h), since Linux 4.6; Python has no name for it."""

NO_COOKIE = frozenset({errno.ENOPROTOOPT, errno.EOPNOTSUPP, errno.EINVAL})
"""What a sandbox or an emulator says that stands in the kernel's place and knows no cookies (qemu
takes any option that it does not know for one of four bytes)."""

INFO_BYTES = 136
RECEIVED = slice(128, 136)
"""``tcpi_bytes_received`` of ``struct tcp_info`` (linux/tcp.h), since Linux 4.1."""

NO_LINGER = struct.pack("ii", 1, 0)
"""When ZeroMQ closes it, it is reset: a peer that does not read, or writes on, would keep the
kernel's half of it for minutes."""


def last_descriptor() -> float:
    """So many descriptors may be in use with the connections that others make."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    return soft - min(SPARE_DESCRIPTORS, soft // 4)


def inode(fd: int) -> int | None:
    """A socket's number as a file, where there are no cookies: it may come again only after four
    thousand million others. None when there is no socket behind ``fd``."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


class TcpPeers:
    """Looks at connections to ``port``, and shuts them down. Used from one thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._nothing)

    def came(self, fd: int) -> int | None:
        """What the kernel calls a connection, and no other before or after it; None when there is
        no connection to the port behind ``fd`` (any more)."""
        with self._held(fd) as sock:
            return None if sock is None else _mark(sock)

    def brought(self, fd: int, mark: int) -> int | None:
        """Bytes that a connection has brought so far; None when it is no more. 0 where the kernel
        does not count them."""
        with self._held(fd) as sock:
            if sock is None or _mark(sock) != mark:
                return None
            with suppress(OSError):
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
                return int.from_bytes(info[RECEIVED], sys.byteorder)
            return 0

    def shut(self, fd: int, mark: int) -> bool:
        """Shut a connection down; the descriptor stays ZeroMQ's to close. False: it was no more."""
        with self._held(fd) as sock:
            if sock is None or _mark(sock) != mark:
                return False
            with suppress(OSError):  # it may have ended itself
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                sock.shutdown(socket.SHUT_RDWR)
            return True

    def used(self) -> int | None:
        """Descriptors of this process; None where the kernel has no count (before Linux 6.2)."""
        return os.stat("/proc/self/fd").st_size or None

    def close(self) -> None:
        os.close(self._copy)
        os.close(self._nothing)

    @contextmanager
    def _held(self, fd: int) -> Iterator[socket.socket | None]:
        """The connection behind ``fd``, which cannot become another one meanwhile."""
        try:
            os.dup2(fd, self._copy, inheritable=False)
        except OSError:  # closed
            yield None
            return
        sock: socket.socket | None = None
        try:
            with suppress(OSError):  # no socket
                sock = socket.socket(fileno=self._copy)
            yield sock if sock is not None and self._leads_here(sock) else None
        finally:
            if sock is not None:
                sock.detach()
            os.dup2(self._nothing, self._copy, inheritable=False)

    def _leads_here(self, sock: socket.socket) -> bool:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        with suppress(OSError):
            return bool(sock.getsockname()[1] == self._port)
        return False


def _mark(sock: socket.socket) -> int | None:
    try:
        return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)
    except OSError as exc:
        if exc.errno not in NO_COOKIE:
            raise
        return inode(sock.fileno())
