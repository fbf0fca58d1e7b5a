"""Roster: of whom a sample tells, where there may be thousands and a sample must be bounded. Pure.

Whoever copies figures serves nobody meanwhile, and a message has a limit. So a sample tells of so
many and no more: first of those who have something new to tell, in the order in which they had;
then of some of the others in turn, so that in the end whoever listens knows them all, whatever was
lost on the way and whenever he began to.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain, islice
from typing import Generic, TypeVar

SAMPLED = 128
"""In a sample at most: to copy the figures of so many takes a millisecond or two, and a message of
them is a tenth of what a message may be."""
REMINDED = 32
"""Of them at most who has nothing new to tell; where there are no more, all are in every sample."""

K = TypeVar("K", bound=Hashable)


class Roster(Generic[K]):
    """Those there are, and whose turn it is. All is done by one thread."""

    def __init__(self, everyone: Iterable[K] = ()) -> None:
        self._news: dict[K, None] = {}
        self.keep(everyone)

    def keep(self, everyone: Iterable[K]) -> None:
        """There are these from now on, and of each there is something to tell."""
        there = dict.fromkeys(everyone)
        self._all = list(there)
        self._news = dict.fromkeys(chain((k for k in self._news if k in there), there))
        self._next = 0

    def note(self, key: K) -> None:
        """Something has happened that is to be told of ``key``, which is one of those there are."""
        self._news[key] = None

    def fades(self, key: K) -> None:
        """Its figures change while nothing happens: a rate falls. It is told of again soon; where
        everyone is in each sample that needs no note, and is no reason for a sample."""
        if len(self._all) > REMINDED:
            self._news[key] = None

    def take(self) -> tuple[list[K], list[K]]:
        """Whom to tell of now: who has news, and others."""
        news = list(islice(self._news, SAMPLED))
        for key in news:
            del self._news[key]
        named = set(news)
        count = min(REMINDED, SAMPLED - len(news), len(self._all))
        turn = [self._all[(self._next + n) % len(self._all)] for n in range(count)]
        self._next = (self._next + count) % max(1, len(self._all))
        return news, [key for key in turn if key not in named]
