"""When the Dispatcher gives its heap back: soon after a burst, seldom in an unbroken stream."""

from __future__ import annotations

from itertools import pairwise

from blockflow.dispatcher import heap as module
from blockflow.dispatcher.heap import LARGE_BYTES, Heap, is_large

MIB = 1024 * 1024
MS, SECOND = 1_000_000, 1_000_000_000
START = 150 * MIB
LOOK = 50 * MS


class World:
    """A heap that keeps what it has once had until it is trimmed."""

    def __init__(self) -> None:
        self.heap = Heap(START)
        self.now = 100 * SECOND
        self.private = START
        self.used = START
        self.held = 0
        self.trims: list[int] = []

    def message(self, nbytes: int) -> None:
        self.heap.passed(self.now)
        self.private = max(self.private, self.used + nbytes)

    def wait(self, ns: int) -> None:
        end = self.now + ns
        while self.now < end:
            self.now += LOOK
            if self.heap.look(self.now, self.private, self.held):
                self.trims.append(self.now)
                self.private = self.used + self.held


def test_a_burst_is_given_back_once_it_is_over() -> None:
    world = World()
    for _ in range(5):
        world.message(900 * MIB)
        world.wait(100 * MS)
    assert not world.trims
    world.wait(module.QUIET_NS)
    assert len(world.trims) == 1 and world.private == START
    world.wait(LOOK)
    assert not world.heap.stirred, "there is nothing more to look at"
    world.wait(100 * SECOND)
    assert len(world.trims) == 1


def test_little_is_kept() -> None:
    world = World()
    world.message(module.KEPT_BYTES)
    world.wait(60 * SECOND)
    assert not world.trims and not world.heap.stirred


def test_a_stream_without_a_pause_pays_seldom() -> None:
    world = World()
    for _ in range(1200):
        world.message(200 * MIB)
        world.wait(100 * MS)
    assert len(world.trims) == 120 * SECOND // module.LONGEST_NS


def test_messages_with_pauses_do_not_pay_each_time() -> None:
    world = World()
    for _ in range(50):
        world.message(200 * MIB)
        world.wait(module.QUIET_NS + 200 * MS)
    assert all(b - a >= module.SPACING_NS for a, b in pairwise(world.trims))
    assert 4 <= len(world.trims) <= 6


def test_what_is_held_is_no_waste_and_not_the_end_of_a_burst() -> None:
    world = World()
    world.message(300 * MIB)
    world.private = START + 300 * MIB
    world.held = 300 * MIB
    world.wait(20 * SECOND)
    assert not world.trims
    world.held = 0
    world.wait(2 * SECOND)
    assert len(world.trims) == 1


def test_what_a_trim_leaves_is_looked_for_again() -> None:
    """Memory of a peer that has gone is free only when all that it had sent is read."""
    world = World()
    world.used = START + 500 * MIB
    world.message(MIB)
    world.wait(5 * SECOND)
    assert len(world.trims) == 1 and world.heap.stirred
    world.used = START
    world.wait(module.SPACING_NS)
    assert len(world.trims) == 2 and world.private == START and not world.heap.stirred
    world.wait(60 * SECOND)
    assert len(world.trims) == 2


def test_trims_that_get_nothing_back_come_to_an_end() -> None:
    world = World()
    world.used = world.private = START + 500 * MIB  # routes, say
    world.message(MIB)
    world.wait(100 * SECOND)
    assert len(world.trims) == 1 + module.AGAIN and not world.heap.stirred
    assert all(b - a >= module.SPACING_NS for a, b in pairwise(world.trims))


def test_what_was_less_once_is_the_least() -> None:
    heap, now = Heap(START), 100 * SECOND
    assert not heap.look(now, START - 2 * module.KEPT_BYTES, 0)
    assert not heap.stirred
    heap.passed(now)
    assert heap.stirred
    assert not heap.look(now + module.QUIET_NS - 1, START, 0)
    assert heap.look(now + module.QUIET_NS, START, 0)


def test_what_is_in_use_is_not_spare() -> None:
    heap, now = Heap(START), 100 * SECOND
    heap.passed(now)
    kept = module.KEPT_BYTES
    assert not heap.look(now + module.QUIET_NS, START + 2 * kept, kept)
    heap.passed(now)
    assert heap.look(now + module.QUIET_NS, START + 2 * kept + 1, kept)


def test_what_is_large() -> None:
    small = bytes(LARGE_BYTES - 1)
    assert not is_large([]) and not is_large([small, small])
    assert is_large([small, bytes(LARGE_BYTES)])
