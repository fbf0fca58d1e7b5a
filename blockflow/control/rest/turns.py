"""Turns: large documents are made one after the other, and once for all that wait for the same.

Whoever writes the JSON of a topology with thousands of tasks keeps the interpreter's lock until it
is written. With as many threads at it as REST has, the one that watches over the workers would have
to wait for all of them whenever it wants the lock: readers would keep it from its work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

LONGEST_S = 5.0
"""After so long it is made out of turn: who has the turn then waits for something itself."""


class Turns(Generic[T]):
    """Makes documents; called by many threads."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._book = threading.Lock()
        self._next: dict[str, Future[T]] = {}

    def made(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` gives, or raises; perhaps that of another thread which asked by the same
        ``name``. It was always begun after this call: who has changed something sees it."""
        with self._book:
            awaited = self._next.get(name)
            if awaited is None:
                mine = self._next[name] = Future()
        if awaited is not None:
            return awaited.result()
        in_turn = self._turn.acquire(timeout=LONGEST_S)
        try:
            with self._book:
                del self._next[name]  # who comes from now on would get what is begun already
            try:
                mine.set_result(make())
            except BaseException as e:
                mine.set_exception(e)
        finally:
            if in_turn:
                self._turn.release()
        return mine.result()
