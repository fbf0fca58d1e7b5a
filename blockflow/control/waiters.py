"""Waiters: who waits in another thread until something is true in the Manager's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from blockflow.core.errors import SystemError_

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


def result_of(future: Future[T], timeout_s: float) -> T:
    """What the Manager's thread has made of it. Raises what that has raised, or SystemError_:
    TIMEOUT."""
    try:
        return future.result(timeout_s)
    except TimeoutError as e:
        raise SystemError_("TIMEOUT", "the control plane is busy", hint="try again") from e
