"""Mapped: device memory as one process of the double has it mapped, and what was unmapped again."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from blockflow.tensormq import cuda_api
from blockflow.tensormq.cuda_fake_world import Access, Memory, RuleBroken, failed

Region = tuple[int, int]
"""First byte and number of bytes of device memory."""


class Mapped:
    """Allocations by their addresses, own ones and imported ones.

    Args:
        lock: whoever changes anything has it.
        broken: notes an offence.
    """

    def __init__(self, lock: threading.RLock, broken: Callable[[str], RuleBroken]) -> None:
        self._lock = lock
        self._broken = broken
        self._memories: dict[int, Memory] = {}
        self._gone: list[Memory] = []  # kept mapped, so that no address comes twice

    def __len__(self) -> int:
        return len(self._memories)

    @property
    def own_bytes(self) -> int:
        return sum(m.nbytes for m in self._memories.values() if m.own)

    def add(self, name: str, mapping: mmap.mmap, own: bool) -> int:
        """Returns the address."""
        memory = Memory(name, mapping, own)
        self._memories[memory.pointer] = memory
        return memory.pointer

    def named(self, name: str) -> Memory | None:
        return next((m for m in self._memories.values() if m.name == name), None)

    def find(self, pointer: int, call: str, own: bool) -> Memory:
        """What begins there. Raises CudaError of ``call``, also where it is not as ``own`` says."""
        memory = self._memories.get(pointer)
        if memory is None or memory.own != own:
            raise failed(call, cuda_api.INVALID_VALUE)
        return memory

    def __getitem__(self, pointer: int) -> Memory:
        return self._memories[pointer]

    def forget(self, memory: Memory) -> None:
        """It is freed, or closed."""
        del self._memories[memory.pointer]
        self._gone.append(memory)

    def holds(self, pointer: int) -> bool:
        """Whether that lies in any of it (else it is of torch's pool)."""
        with self._lock:
            if any(m.pointer <= pointer < m.pointer + m.nbytes for m in self._gone):
                raise self._broken("device memory is used after it was freed or closed")
            return any(p <= pointer < p + m.nbytes for p, m in self._memories.items())

    def access(self, region: Region, kind: str) -> Access:
        """A kernel's use of it. Raises CudaError where there is none."""
        start, nbytes = region
        with self._lock:
            for pointer, memory in self._memories.items():
                if pointer <= start and start + nbytes <= pointer + memory.nbytes:
                    return Access(memory.name, start - pointer, nbytes, kind)
        self.holds(start)
        raise failed("launch", cuda_api.ILLEGAL_ADDRESS)
