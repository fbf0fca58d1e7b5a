"""Segments of granted memory: sealed memory files, mapped by the Dispatcher and by one client.

A memory file has no name: nothing is left behind, whoever is killed. The seals forbid to shrink it,
so that no access to the mapping can end in SIGBUS, and to grow it, so that a client can use no more
than the book counts. (A hole that a client punches reads as zeros. Only with strict overcommit of
memory could filling it fail: there nothing is granted.)
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from blockflow.core.errors import WireError
from blockflow.tensormq.forks import in_child
from blockflow.tensormq.grants import HEADER_BYTES, segment_bytes

_STRICT = "2"


def unsupported() -> str:
    """Why this machine can have no segments; '' when it can."""
    if not hasattr(os, "memfd_create"):
        return "this platform has no memory files"
    try:
        policy = Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip()
    except OSError:
        policy = ""
    return "memory is not overcommitted on this machine" if policy == _STRICT else ""


class Segment:
    """A mapping of one segment.

    Attributes:
        marks: one word per slot; the client writes them, the Dispatcher reads them.
    """

    def __init__(self, mapping: mmap.mmap, slot_bytes: int, slots: int) -> None:
        self._data = memoryview(mapping)
        self._slot_bytes = slot_bytes
        self._slots = slots
        self.marks = self._data[: 4 * slots].cast("I")

    @classmethod
    def create(cls, slot_bytes: int, slots: int) -> tuple[Segment, int]:
        """A new segment and its descriptor, which the caller passes on and closes.

        Raises:
            OSError: the machine has no descriptor, or no address space.
        """
        import fcntl

        nbytes = segment_bytes(slot_bytes, slots)
        fd = os.memfd_create("blockflow-grant", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            return cls(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), slot_bytes, slots), fd
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, slot_bytes: int, slots: int) -> Segment:
        """Map what came over the side connection, and close the descriptor.

        A forked child cannot touch it: it would see slots that are used again. Its addresses stay
        taken there (MADV_DONTFORK would give them to the child's own memory, which would then go
        with the last reference to this mapping).

        Raises:
            WireError: MALFORMED_MESSAGE: not a sealed file of that size.
            OSError: it cannot be mapped.
        """
        import fcntl

        nbytes = segment_bytes(slot_bytes, slots)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != nbytes:
                raise WireError("MALFORMED_MESSAGE", f"not a sealed memory file of {nbytes} bytes")
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        finally:
            os.close(fd)
        in_child(mapping, partial(_forbid, _mprotect()))
        return cls(mapping, slot_bytes, slots)

    def slot(self, index: int, nbytes: int) -> memoryview:
        """The first ``nbytes`` of a slot.

        Raises:
            WireError: MALFORMED_MESSAGE: there is no such slot, or it is smaller.
        """
        if not 0 <= index < self._slots or not 0 <= nbytes <= self._slot_bytes:
            raise WireError("MALFORMED_MESSAGE", f"slot {index} holds no {nbytes} bytes")
        start = HEADER_BYTES + index * self._slot_bytes
        return self._data[start : start + nbytes]

    def close(self) -> None:
        """Let go of the mapping: the memory goes with the last view. Idempotent."""
        self.marks = self._data = memoryview(b"")


def _mprotect() -> Callable[..., Any]:
    """The C library's; looked up before a fork, since that takes the loader's lock."""
    import ctypes

    return ctypes.CDLL(None).mprotect


def _forbid(mprotect: Callable[..., Any], mapping: mmap.mmap) -> None:
    """In a forked child: any access ends it (SIGSEGV)."""
    import ctypes

    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    mprotect(ctypes.c_void_p(start), ctypes.c_size_t(len(mapping)), 0)  # PROT_NONE
