"""Figures of the control plane's own processes."""

from __future__ import annotations

import os
import time

import pytest

from blockflow.control import own
from blockflow.control.own import OwnFigures

SECOND = 1_000_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [time.monotonic_ns()]
    monkeypatch.setattr(own.time, "monotonic_ns", lambda: now[0])
    return now


def test_they_are_looked_at_once_a_second(clock: list[int]) -> None:
    figures = OwnFigures()
    first = figures.figures(0)
    assert first["process"]["pid"] == os.getpid() and first["process"]["uss"] > 0
    clock[0] += SECOND - 1
    assert figures.figures(0) is first
    clock[0] += 1
    assert figures.figures(0) is not first


def test_a_template_is_another_process_after_its_death(
    clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    class Walk:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def look(self, now_ns: int, rss: int) -> tuple[int, int]:
            looks.append(self.pid)
            return self.pid + 1, self.pid + 2

    monkeypatch.setattr(own, "MemoryWalk", Walk)
    figures = OwnFigures()
    seen = []
    for pid in (0, 5, 5, 6, 0):
        seen.append(figures.figures(pid)["template"])
        clock[0] += SECOND
    assert looks == [5, 5, 6]
    none = {"pid": None, "uss": 0, "pss": 0}
    five, six = {"pid": 5, "uss": 6, "pss": 7}, {"pid": 6, "uss": 7, "pss": 8}
    assert seen == [none, five, five, six, none]
