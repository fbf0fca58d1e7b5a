"""BufferPool: memory of a worker for tensors that stay in it, used again and again.

Results between blocks of one worker, and inputs that are put together, come and go with each
batch. Asked of the C library's heap each time, a tensor seldom finds the place of the one before it
free as a whole: small things lie in the gaps that its alignment has left. So the heap grows for
seconds, page fault by page fault, and keeps more than is in use.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, insort_left
from collections import deque
from collections.abc import Sequence
from math import prod
from threading import Lock
from weakref import ref

import torch
from torch import Tensor

from blockflow.tensormq.ebb import WINDOW_NS

LEAST = 64 * 1024
"""Bytes of what is worth a buffer; the heap finds room for less without growing."""
_STEPS = 8
"""Sizes between two powers of two: who grows step by step does not need another one each time."""
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class _Buffer(mmap.mmap):
    """Memory, and how much of it was ``needed`` at once since the window began."""

    needed = 0


class BufferPool:
    """Buffers for tensors on the CPU; each is free again when nothing refers to its tensor any
    more, nor to a view of it.

    There are never more buffers than tensors were alive at once, and none is larger than the
    largest of them by more than an eighth. Of what a burst has left nothing stays that nobody needs
    for a whole window. Any thread may ask, and any may let go.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[_Buffer] = []  # by size; of one size the last that was used comes first
        self._lent: dict[int, tuple[ref[memoryview], _Buffer]] = {}  # by id of the reference
        # Letting go may happen anywhere, in the collector too, while this thread holds the lock.
        self._back: deque[ref[memoryview]] = deque()
        self._due_ns = 0

    def take(self, dims: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """A contiguous tensor of any content; None if the heap may as well give it."""
        count = prod(dims)
        nbytes = count * dtype.itemsize
        if nbytes < LEAST:
            return None
        with self._lock:
            buffer = self._buffer(nbytes)
            if buffer is None:
                return None
            # The tensor's storage holds the view, and lives as long as any tensor on it.
            view = memoryview(buffer)
            lent = ref(view, self._back.append)
            self._lent[id(lent)] = lent, buffer
        return torch.frombuffer(view, dtype=dtype, count=count).view(dims)

    def ebb(self, now_ns: int) -> None:
        """Give back what is free, and was not needed for a minute, or not half of it: to be called
        now and then, as an arena's."""
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + WINDOW_NS
        with self._lock:
            self._collect()
            # They end with this list, behind the lock: large ones take the kernel milliseconds.
            former = self._free
            self._free = [buffer for buffer in former if 2 * buffer.needed >= len(buffer)]
            for buffer in self._free:
                buffer.needed = 0

    def _collect(self) -> None:
        while self._back:
            _, buffer = self._lent.pop(id(self._back.popleft()))
            insort_left(self._free, buffer, key=len)

    def _buffer(self, nbytes: int) -> _Buffer | None:
        """The smallest free one that is large enough, or another in the largest one's stead."""
        self._collect()
        at = bisect_left(self._free, nbytes, key=len)
        if at < len(self._free):
            buffer = self._free.pop(at)
            buffer.needed = max(buffer.needed, nbytes)
            return buffer
        if self._free:
            self._free.pop()
        try:
            buffer = _Buffer(-1, _rounded(nbytes), flags=_FLAGS)
        except OSError:  # no memory: whoever asks the heap says so
            return None
        buffer.needed = nbytes
        return buffer


def _rounded(nbytes: int) -> int:
    """Up to the next of some sizes between two powers of two."""
    step = max(mmap.PAGESIZE, (1 << (nbytes.bit_length() - 1)) // _STEPS)
    return -(-nbytes // step) * step
