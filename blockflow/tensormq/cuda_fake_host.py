"""LockedHost: the host memory that one process of the double has page-locked, with its rules."""

from __future__ import annotations

import mmap
import threading

from blockflow.tensormq import cuda_api
from blockflow.tensormq.cuda_fake_world import failed

READ_ONLY, WRITABLE = "r", "w"


class LockedHost:
    """Regions by address."""

    def __init__(self) -> None:
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
