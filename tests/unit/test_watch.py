"""The watch over connections: when it looks, whom it cuts off, and when memory is given back."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockflow.dispatcher import watch as module
from blockflow.dispatcher.descriptors import Doors, OwnMemory
from blockflow.dispatcher.heap import KEPT_BYTES
from blockflow.dispatcher.unread import CONNECTION_BYTES, UNEXPLAINED_BYTES
from blockflow.dispatcher.watch import Watch

MS = 1_000_000
UNIX = 9


class World:
    """A process with connections: what they have brought, what memory it has, what is done."""

    def __init__(self) -> None:
        self.received: dict[int, int | None] = {UNIX: None}
        self.private = 0
        self.cpu_ns = 0
        self.done: list[Any] = []
        doors = SimpleNamespace(shut=lambda fd, name: self.done.append((fd, name)))
        self.watch = Watch(cast(Doors, doors))

    def read(self) -> int:
        self.done.append("read")
        return self.private

    def close(self) -> None:
        self.done.append("closed")

    def thread_time_ns(self) -> int:
        self.cpu_ns += 2 * MS
        return self.cpu_ns

    def look(self, now_ms: int, *, held: int = 0, drained: bool = True) -> list[Any]:
        self.done.clear()
        self.watch.look(now_ms * MS, held, drained=drained)
        self.done.remove("read")
        return self.done


@pytest.fixture
def w(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World.__new__(World)
    monkeypatch.setattr(module, "OwnMemory", lambda: made)
    monkeypatch.setattr(module, "bytes_received", lambda fd: made.received.get(fd))
    monkeypatch.setattr(module, "give_memory_back", lambda: made.done.append("given back"))
    monkeypatch.setattr(module.time, "thread_time_ns", lambda: made.thread_time_ns())
    made.__init__()  # type: ignore[misc]
    return made


def test_it_looks_while_there_is_something_to_look_at(w: World) -> None:
    it = w.watch
    it.began(UNIX, 70)
    assert it.next_ms() is None and not it.due(0)
    w.received[5] = 0
    it.began(5, 71)
    assert it.next_ms() == 50 and it.due(0)
    assert w.look(1000) == []
    assert not it.due(1099 * MS) and it.due(1100 * MS), "fifty times what a look takes"
    w.received[5] = None  # it has just ended
    assert w.look(1100) == []
    it.gone(5)
    assert it.next_ms() is None and not it.due(1100 * MS)
    it.close()
    assert w.done == ["closed"]


def test_who_leaves_too_much_unread_is_cut_off_at_the_second_look(
    w: World, caplog: pytest.LogCaptureFixture
) -> None:
    it = w.watch
    for fd in (5, 6):
        w.received[fd] = 0
        it.began(fd, 70 + fd)
    assert w.look(0) == []
    w.received[5] = CONNECTION_BYTES + 1000
    assert w.look(100) == [] and it.next_ms() == 5
    assert not it.due(104 * MS) and it.due(105 * MS)
    assert w.look(105) == [(5, 75)] and it.ended == 1
    assert caplog.messages == ["a client left too much unread: cut off (1 so far)"]
    assert w.look(200) == [] and it.next_ms() == 50, "it is known no more"
    it.freed(600 * MS)  # what is freed later does not put it off
    assert w.look(1104) == [] and w.look(1105) == ["given back"] and w.look(2000) == []
    it.gone(6)
    assert it.next_ms() is None


def test_what_was_thrown_away_is_given_back_without_a_connection(w: World) -> None:
    w.watch.freed(0)
    assert w.watch.next_ms() == 50 and w.look(999) == [] and w.look(1000) == ["given back"]
    assert w.watch.next_ms() is None


def test_memory_that_may_be_kept_only_is_given_back_before_anybody_is_judged_by_it(
    w: World,
) -> None:
    w.received[5] = 0
    w.watch.began(5, 75)
    assert w.look(0) == []
    w.received[5] = UNEXPLAINED_BYTES // 8
    w.private = 2 * UNEXPLAINED_BYTES
    assert w.look(100, drained=False) == [] and w.watch.next_ms() == 5
    w.private = w.received[5]
    assert w.look(105, drained=False) == ["given back"] and w.watch.next_ms() == 50


def test_what_large_messages_have_left_is_given_back(w: World) -> None:
    w.watch.large(0)
    w.private = KEPT_BYTES + 1
    assert w.watch.next_ms() == 50
    assert w.look(999) == [] and w.look(1000) == ["given back"]


def test_memory_of_its_own_is_what_is_not_shared() -> None:
    memory = OwnMemory()
    for _ in range(2):
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        own = (resident - shared) * resource.getpagesize()
        assert abs(memory.read() - own) < min(own, 8 << 20)
    memory.close()
    with pytest.raises(ValueError):
        memory.read()
