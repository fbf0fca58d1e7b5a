"""Which bytes of an arena are free: first fit at the lowest address, neighbours coalesced.

The lowest address wins on purpose: a lightly loaded arena keeps using the same few pages, which
stay in the caches and in the page tables, and pages that no load has needed yet are never touched.
"""

from __future__ import annotations

from bisect import bisect_left

from blockflow.core import limits

GRANULE = 64
"""Smallest unit: a cache line, and the alignment that vectorised kernels want."""


class Extents:
    """Free extents of ``capacity`` bytes.

    Extents of ``align`` bytes and more start at multiples of ``align`` and take multiples of it;
    smaller ones are packed at multiples of :data:`GRANULE`, so that a tensor of a few bytes does
    not cost a page. The cost of both operations grows with the number of free extents, never with
    sizes.
    """

    __slots__ = ("_align", "_sizes", "_starts", "capacity", "used")

    def __init__(self, capacity: int, align: int = limits.ARENA_ALIGN) -> None:
        if capacity < GRANULE or capacity % GRANULE:
            raise ValueError(f"capacity {capacity} is not a positive multiple of {GRANULE}")
        if align < GRANULE or align & (align - 1):
            raise ValueError(f"align {align} is not a power of two >= {GRANULE}")
        self.capacity = capacity
        self.used = 0
        self._align = align
        self._starts = [0]
        self._sizes = [capacity]

    @property
    def end(self) -> int:
        """Where the highest extent in use ends; 0 when there is none."""
        starts, sizes = self._starts, self._sizes
        if starts and starts[-1] + sizes[-1] == self.capacity:
            return starts[-1]
        return self.capacity

    def size_of(self, nbytes: int) -> int:
        """Bytes that an extent for ``nbytes`` takes."""
        unit = self._align if nbytes >= self._align else GRANULE
        return max(unit, -(-nbytes // unit) * unit)

    def take(self, size: int) -> int | None:
        """Start of ``size`` bytes (a value of :meth:`size_of`), or None when no gap fits."""
        starts, sizes = self._starts, self._sizes
        unit = self._align if size >= self._align else GRANULE
        for i, start in enumerate(starts):
            lead = -start % unit
            rest = sizes[i] - lead - size
            if rest < 0:
                continue
            if lead:
                sizes[i] = lead
                if rest:
                    starts.insert(i + 1, start + lead + size)
                    sizes.insert(i + 1, rest)
            elif rest:
                starts[i] = start + size
                sizes[i] = rest
            else:
                del starts[i], sizes[i]
            self.used += size
            return start + lead
        return None

    def give(self, start: int, size: int) -> None:
        """Return what :meth:`take` gave.

        Raises:
            ValueError: the bytes are (partly) free already.
        """
        starts, sizes = self._starts, self._sizes
        i = bisect_left(starts, start)
        end = start + size
        if (i and starts[i - 1] + sizes[i - 1] > start) or (i < len(starts) and starts[i] < end):
            raise ValueError(f"bytes {start}..{end} are free already")
        self.used -= size
        if i < len(starts) and starts[i] == end:
            starts[i] = start
            sizes[i] += size
        else:
            starts.insert(i, start)
            sizes.insert(i, size)
        if i and starts[i - 1] + sizes[i - 1] == start:
            sizes[i - 1] += sizes[i]
            del starts[i], sizes[i]

    def gaps(self) -> list[tuple[int, int]]:
        """(start, size) of all free extents by address."""
        return list(zip(self._starts, self._sizes, strict=True))
