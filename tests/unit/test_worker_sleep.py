"""How a worker's threads sleep: a short window of a policy is not rounded up to a millisecond."""

from __future__ import annotations

import os
import select
import time
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.worker.turns import NEVER_NS, sleep
from tests.turns_rig import serving

US, MS = 1000, 1_000_000


class Kernel:
    """An epoll, and ``select``, that only note for how many seconds they are asked to sleep."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.polls: list[float | None] = []
        self.selects: list[float] = []

    def fileno(self) -> int:
        return self.fd

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self.polls.append(timeout)
        return []

    def select(self, *args: Any) -> None:
        assert args[0] == (self,)
        self.selects.append(args[3])


def asked(monkeypatch: pytest.MonkeyPatch, until_ns: int, fd: int = 9) -> Kernel:
    kernel = Kernel(fd)
    monkeypatch.setattr(select, "select", kernel.select)
    monkeypatch.setattr(time, "monotonic_ns", lambda: 10**12)
    sleep(kernel, until_ns)  # type: ignore[arg-type]
    monkeypatch.undo()
    return kernel


def test_a_short_sleep_is_counted_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = asked(monkeypatch, 10**12 + 300 * US)
    assert kernel.selects == [300e-6] and kernel.polls == [0]


@pytest.mark.parametrize(
    ("left_ns", "fd", "polls"),
    [
        (500 * MS, 9, [0.5]),
        (-MS, 9, [0.0]),
        (NEVER_NS, 9, [None]),
        (300 * US, 5000, [300e-6]),  # ``select`` does not take that one
    ],
)
def test_other_sleeps_are_one_call(
    left_ns: int, fd: int, polls: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = asked(monkeypatch, 10**12 + left_ns, fd)
    assert kernel.polls == polls and kernel.selects == []


@pytest.mark.parametrize("left_ns", [5 * MS, 30_000 * MS, NEVER_NS])
def test_what_has_happened_ends_it(left_ns: int) -> None:
    bell = os.eventfd(1)
    epoll = select.epoll()
    try:
        epoll.register(bell, select.EPOLLIN)
        until = min(NEVER_NS, time.monotonic_ns() + left_ns)
        assert sleep(epoll, until) == [(bell, select.EPOLLIN)]
    finally:
        epoll.close()
        os.close(bell)


def test_from_block_to_block_the_data_thread_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change of what it listens to is a call of the kernel."""
    with serving(lanes=1) as rig:
        told: list[int] = []
        data = SimpleNamespace(modify=lambda fd, events: told.append(events))
        monkeypatch.setattr(rig.turns, "_data", data)
        rig.send(1, 2, 3)
        for _ in range(4):
            rig.go(rig.engine)
        assert rig.answered() == [1] and rig.engine.at == "asleep"
        assert told == [select.EPOLLIN, 0]
