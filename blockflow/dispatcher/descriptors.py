"""What the kernel says of connections by their descriptors, which belong to ZeroMQ."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import socket
import struct
import sys
from contextlib import suppress

_SPARE_DESCRIPTORS = 256
"""So many are not for clients' connections; of a small limit, a quarter."""

_INFO_BYTES = 136
_RECEIVED = slice(128, 136)
"""``tcpi_bytes_received`` of ``struct tcp_info`` (linux/tcp.h), since Linux 4.1."""

_NO_LINGER = struct.pack("ii", 1, 0)
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None)


def last_descriptor() -> float:
    """The highest descriptor that a client's connection may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    return soft - min(_SPARE_DESCRIPTORS, soft // 4)


def inode(fd: int) -> int | None:
    """Of the file behind a descriptor of this process; None when it is closed."""
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None


def bytes_received(fd: int) -> int | None:
    """What a TCP connection has brought so far; None when it is none, or the kernel is too old."""
    # By the C library: a socket object would ask the kernel four times more, and close the
    # descriptor when it is collected.
    info = ctypes.create_string_buffer(_INFO_BYTES)
    size = ctypes.c_uint(_INFO_BYTES)
    if _LIBC.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size)) != 0:
        return None
    return int.from_bytes(info.raw[_RECEIVED], sys.byteorder) if size.value == _INFO_BYTES else None


def end_connection(fd: int, expected: int) -> None:
    """Shut a connection down, if the file behind its descriptor still is the ``expected`` inode.

    That frees what ZeroMQ holds for it; the descriptor stays ZeroMQ's to close.
    """
    try:
        # A copy of the descriptor cannot become another connection while we look at it.
        copy = os.dup(fd)
    except OSError:
        return
    if inode(copy) != expected:
        os.close(copy)
        return
    with socket.socket(fileno=copy) as mine, suppress(OSError):  # it may have ended itself
        # When ZeroMQ closes it, it is reset: a peer that does not read, or writes on, would keep
        # the kernel's half of it for minutes.
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        mine.shutdown(socket.SHUT_RDWR)


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
