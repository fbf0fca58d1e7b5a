"""Turns: one document at a time, and one for all that wait for the same."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from blockflow.control.rest import turns
from blockflow.control.rest.turns import Turns

PATIENCE_S = 20.0


class Desk:
    """A document whose making can be held up; ``made`` counts."""

    def __init__(self) -> None:
        self.made = 0
        self.at_once = self.most = 0
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()

    def make(self) -> int:
        self.made += 1
        mine = self.made
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.begun.release()
        assert self.go.wait(PATIENCE_S)
        self.at_once -= 1
        return mine


def waiting(shared: Turns[int], name: str) -> bool:
    return name in shared._next


def test_who_comes_while_one_is_made_gets_the_next_with_all_others() -> None:
    """Never the one that was begun before: what its reader has just changed would be missing."""
    shared, desk = Turns[int](), Desk()
    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(shared.made, "a", desk.make)
        assert desk.begun.acquire(timeout=PATIENCE_S)
        later = [pool.submit(shared.made, "a", desk.make) for _ in range(9)]
        while not waiting(shared, "a"):
            pass
        desk.go.set()
        assert first.result(PATIENCE_S) == 1
        # one that came late enough may have begun a third
        assert {f.result(PATIENCE_S) for f in later} <= {2, 3}
    assert desk.made <= 3


def test_different_ones_are_made_one_after_the_other() -> None:
    shared, desk = Turns[int](), Desk()
    desk.go.set()
    with ThreadPoolExecutor(16) as pool:
        for f in [pool.submit(shared.made, str(n % 4), desk.make) for n in range(200)]:
            f.result(PATIENCE_S)
    assert desk.most == 1


def test_an_error_goes_to_all_that_wait_and_stays_with_nobody() -> None:
    shared = Turns[int]()

    def fail() -> int:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            shared.made("a", fail)
    assert shared.made("a", lambda: 7) == 7


def test_nobody_waits_for_long_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONGEST_S", 0.05)
    shared, desk = Turns[int](), Desk()
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(shared.made, "a", desk.make)
        assert desk.begun.acquire(timeout=PATIENCE_S)
        assert shared.made("b", lambda: 5) == 5
        desk.go.set()
        assert hung.result(PATIENCE_S) == 1
    assert shared.made("b", lambda: 6) == 6
