"""Ordering: blocks in the order in which paths visit them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


def along(paths: Iterable[Sequence[str]], names: Sequence[str]) -> list[str]:
    """``names`` in an order in which every path visits them, as far as there is one.

    Where the paths leave it open, or contradict each other, the given order stays.
    """
    if len(names) < 2:  # of most workers: no path needs to be looked at
        return list(names)
    before: dict[str, set[str]] = {name: set() for name in names}
    for path in paths:
        for here, there in pairwise([name for name in path if name in before]):
            before[there].add(here)
    left, placed = list(names), []
    while left:
        ready = next((n for n in left if not before[n] & set(left)), left[0])
        left.remove(ready)
        placed.append(ready)
    return placed
