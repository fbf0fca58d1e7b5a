"""How much of an arena is kept, and for how long."""

from __future__ import annotations

import pytest

from blockflow.tensormq.ebb import SCARCE_NS, WINDOW_NS, Ebb, window_ns

MIB = 1024 * 1024
SECOND = 1_000_000_000


class Load:
    """An arena whose heartbeat comes four times a second."""

    def __init__(self) -> None:
        self.ebb = Ebb()
        self.now = 1000 * SECOND
        self.committed = MIB
        self.end = 0
        self.changes = 0

    def need(self, end: int) -> None:
        self.committed = max(self.committed, end)
        self.ebb.peak = max(self.ebb.peak, end)

    def wait(self, ns: int) -> None:
        until = self.now + ns
        while self.now < until:
            self.now += SECOND // 4
            if self.ebb.due(self.now):
                keep = self.ebb.look(self.now, self.end, self.committed, WINDOW_NS)
                if keep is not None and keep < self.committed:
                    self.committed = max(keep, MIB)
                    self.changes += 1


def test_a_burst_is_kept_for_a_window_at_least_and_two_at_most() -> None:
    for start in range(0, WINDOW_NS, WINDOW_NS // 10):
        load = Load()
        load.wait(start + SECOND // 4)
        load.need(75 * MIB)
        load.wait(WINDOW_NS - SECOND // 4)
        assert load.committed == 75 * MIB
        load.wait(WINDOW_NS + SECOND)
        assert load.committed == MIB


@pytest.mark.parametrize(
    ("rooms", "window"),
    [
        ([(100, 100)], WINDOW_NS),
        ([(25, 100)], WINDOW_NS),
        ([(24, 100)], SCARCE_NS),
        ([(0, 0)], WINDOW_NS),
        ([(100, 100), (25, 100)], WINDOW_NS),
        ([(100, 100), (24, 100), (100, 100)], SCARCE_NS),
        ([(100, 100), (-1, 100)], SCARCE_NS),
    ],
)
def test_where_memory_is_scarce_the_window_is_short(
    rooms: list[tuple[int, int]], window: int
) -> None:
    assert window_ns(*rooms) == window


def test_a_short_window_ends_a_long_one() -> None:
    ebb, now = Ebb(), 1000 * SECOND
    assert ebb.look(now, 0, MIB, WINDOW_NS) == 0
    ebb.peak = 75 * MIB
    now += SCARCE_NS
    assert ebb.due(now) and ebb.look(now, 0, 75 * MIB, WINDOW_NS) is None
    assert not ebb.due(now + SCARCE_NS - 1)
    now += SCARCE_NS
    assert ebb.look(now, 0, 75 * MIB, SCARCE_NS) is None, "it was needed within this one"
    assert ebb.look(now + SCARCE_NS, 0, 75 * MIB, SCARCE_NS) == 0


def test_a_steady_load_never_pays_again() -> None:
    load = Load()
    for _ in range(200):
        load.need(75 * MIB)
        load.wait(WINDOW_NS - SECOND)
    assert not load.changes


def test_a_load_that_varies_a_little_keeps_what_it_has() -> None:
    load = Load()
    load.need(100 * MIB)
    for _ in range(10):
        load.wait(WINDOW_NS // 2)
        load.need(51 * MIB)
    assert load.committed == 100 * MIB
    for _ in range(10):
        load.wait(WINDOW_NS // 2)
        load.need(30 * MIB)
    assert load.committed == 30 * MIB


def test_what_lies_there_is_needed() -> None:
    load = Load()
    load.need(100 * MIB)
    load.end = 40 * MIB
    load.wait(4 * WINDOW_NS)
    assert load.committed == 40 * MIB
