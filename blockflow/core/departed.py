"""Departed: who is known to be dead, by its incarnation, which nobody else will ever have. Pure."""

from __future__ import annotations

DEPARTED_KEPT = 4096


class Departed:
    """The last processes that have died; a system that lives for long has had any number of them.

    Messages of a dead process come for a moment, and of one that is forgotten there is no memory
    left to be found.
    """

    __slots__ = ("_dead",)

    def __init__(self) -> None:
        self._dead: dict[int, None] = {}  # in order of death

    def add(self, incarnation: int) -> None:
        self._dead[incarnation] = None
        if len(self._dead) > DEPARTED_KEPT:
            del self._dead[next(iter(self._dead))]

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._dead
