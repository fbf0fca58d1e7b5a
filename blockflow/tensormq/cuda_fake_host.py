"""LockedHost: the host memory that one process of the double has page-locked, with its rules."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

from blockflow.tensormq import cuda_api
from blockflow.tensormq.cuda_fake_world import RuleBroken, failed

READ_ONLY, WRITABLE = "r", "w"


class LockedHost:
    """Regions by address. ``broken`` notes an offence."""

    def __init__(self, broken: Callable[[str], RuleBroken]) -> None:
        self._broken = broken
        self._regions: dict[int, tuple[int, str]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._regions)

    def register(self, address: int, nbytes: int, read_only: bool) -> None:
        call = "cuMemHostRegister_v2"
        if nbytes <= 0 or address % mmap.PAGESIZE:
            raise failed(call, cuda_api.INVALID_VALUE)
        with self._lock:
            for start, (size, _) in self._regions.items():
                if address < start + size and start < address + nbytes:
                    raise failed(call, cuda_api.ALREADY_REGISTERED)
            self._regions[address] = nbytes, READ_ONLY if read_only else WRITABLE

    def unregister(self, address: int) -> None:
        with self._lock:
            if self._regions.pop(address, None) is None:
                raise failed("cuMemHostUnregister", cuda_api.NOT_REGISTERED)

    def locked(self, address: int, nbytes: int) -> str | None:
        """How a region that a copy uses is page-locked; None if it is not. A part of it only is
        against the rules."""
        with self._lock:
            for start, (size, kind) in self._regions.items():
                if address < start + size and start < address + nbytes:
                    if start <= address and address + nbytes <= start + size:
                        return kind
                    raise failed("cuMemcpyAsync", cuda_api.INVALID_VALUE)
        return None

    def read(self, address: int, nbytes: int) -> Callable[[], bytes]:
        """What a copy to the device reads when the device comes to it: page-locked memory is to be
        still what it was when the copy was ordered. Other memory is read at once."""
        given = ctypes.string_at(address, nbytes)
        locked = self.locked(address, nbytes) is not None

        def read() -> bytes:
            if locked:
                self._still(address, nbytes)
                if ctypes.string_at(address, nbytes) != given:
                    raise self._broken("page-locked memory changed before it was on the device")
            return given

        return read

    def write(self, address: int, nbytes: int) -> Callable[[int], None]:
        """What a copy from the device's memory does when the device comes to it."""
        kind = self.locked(address, nbytes)
        if kind == READ_ONLY:
            raise self._broken("a copy into memory that was page-locked for reading")

        def write(source: int) -> None:
            if kind is not None:
                self._still(address, nbytes)
            ctypes.memmove(address, source, nbytes)

        return write

    def _still(self, address: int, nbytes: int) -> None:
        if self.locked(address, nbytes) is None:
            raise self._broken("host memory is page-locked no more when its copy begins")
