"""Waiters: who waits in another thread until something is true in the Manager's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from blockflow.core.errors import SystemError_

_LOOK_S = 1.0
"""Who waits asks so often whether it is in vain."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiter:
    """Resolved when ``test`` gives something else than None, or at ``deadline_ns``."""

    test: Callable[[], Any]
    deadline_ns: int
    future: Future[Any]


class Waiters:
    """Those of one Manager; used in its thread only."""

    def __init__(self) -> None:
        self._all: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        self._all.append(waiter)

    def deadlines(self) -> list[int]:
        """When :meth:`check` is due at the latest."""
        return [w.deadline_ns for w in self._all]

    def check(self, now_ns: int) -> None:
        """Tell those who need not wait any longer; one whose test raises gets that."""
        left = []
        for waiter in self._all:
            try:
                found = waiter.test()
            except Exception as e:  # it is the waiting one's affair, and nobody else's
                waiter.future.set_exception(e)
                continue
            if found is not None or now_ns >= waiter.deadline_ns:
                waiter.future.set_result(found)
            else:
                left.append(waiter)
        self._all = left

    def dismiss(self) -> None:
        """The thread ends: nothing will come true any more."""
        for waiter in self._all:
            waiter.future.set_result(None)
        self._all = []


def fulfil(future: Future[T], act: Callable[[], T]) -> None:
    """Do ``act`` for whoever waits for ``future``, and gets what it gives or raises, whatever it
    is."""
    try:
        future.set_result(act())
    except Exception as e:
        future.set_exception(e)


def result_of(future: Future[T], timeout_s: float, stuck: Callable[[], str] = str) -> T:
    """What the Manager's thread has made of it. Raises what that has raised, or SystemError_:
    TIMEOUT; sooner than in ``timeout_s``, where that thread is ``stuck`` and it is known why."""
    end = time.monotonic() + timeout_s
    while True:
        left = end - time.monotonic()
        wait([future], max(0.0, min(left, _LOOK_S)))
        if future.done():
            return future.result()
        if (why := stuck()) or left <= _LOOK_S:
            busy = ": ".join(filter(None, ("the control plane is busy", why)))
            raise SystemError_("TIMEOUT", busy, hint="try again")
