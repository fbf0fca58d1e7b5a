"""Clients' connections beyond the descriptors that they may have: who is turned away for whom."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from blockflow.dispatcher import peers as module
from blockflow.dispatcher.connections import SPEAKS_NS
from blockflow.dispatcher.descriptors import Doors
from blockflow.dispatcher.peers import Peers
from blockflow.dispatcher.watch import Watch

LAST = 9
"""The last descriptor that clients may have."""


class World:
    """A socket's connections; ``stay`` are those that nobody can turn away."""

    def __init__(self) -> None:
        self.events: list[list[bytes]] = []
        self.away: list[int] = []
        self.stay: set[int] = set()
        self.watched: list[str] = []
        self.shut: list[int] = []
        self.left = False  # something waits to be read
        departures = SimpleNamespace(
            poll=lambda _: bool(self.events),
            recv_multipart=lambda _: self.events.pop(0),
            close=lambda _: None,
        )
        socket = SimpleNamespace(
            get_monitor_socket=lambda _: departures,
            disable_monitor=lambda: None,
            poll=lambda _: self.left,
        )
        watch = SimpleNamespace(
            began=lambda fd, name: self.watched.append(f"+{fd}"),
            gone=lambda fd: self.watched.append(f"-{fd}"),
            delivered=lambda fd, nbytes: None,
            close=lambda: self.watched.append("closed"),
        )
        doors = SimpleNamespace(
            turn_away=self._turn_away, shut=lambda fd, name: self.shut.append(fd) or True
        )
        self.peers = Peers(
            cast(Any, socket), cast(Doors, doors), cast(Watch, watch), encrypted=False
        )

    def _turn_away(self, fd: int, name: int) -> bool:
        assert name == 100 + fd
        if fd not in self.stay:
            self.away.append(fd)
        return fd not in self.stay

    def heard(self, client: bytes, fd: int) -> bool:
        frame = SimpleNamespace(get=lambda _: fd)
        return self.peers.hear(client, [cast(zmq.Frame, frame)], 0)

    def note(self, *events: int, now_ns: int = SPEAKS_NS) -> list[int]:
        """Connections that have come, and by their negative ones those that have ended; who was
        turned away because of them."""
        for fd in events:
            kind = zmq.EVENT_ACCEPTED if fd > 0 else zmq.EVENT_DISCONNECTED
            self.events.append([struct.pack("=Hi", kind, abs(fd)), b""])
        self.away.clear()
        self.peers.note(now_ns)
        assert not self.events
        return self.away


def given(count: int) -> bytes:
    """A name that ZeroMQ has made."""
    return b"\0" + count.to_bytes(4)


@pytest.fixture
def w(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(module, "mark", lambda fd: 100 + fd)
    monkeypatch.setattr(module, "last_descriptor", lambda: LAST)
    return World()


def test_for_each_beyond_the_last_the_one_goes_that_was_silent_for_longest(w: World) -> None:
    assert w.note(5, 6, 7, LAST, now_ns=0) == []
    assert w.note(10) == [5] and w.peers.turned_away == 1
    assert w.note(11) == [6]
    assert w.note(-5, 5) == [7], "it has the descriptor of one that had to go"
    assert w.note(-10, -11, -6, -7) == [] and w.note(6, 7, 8) == []
    assert w.note(10) == [LAST] and w.peers.turned_away == 4
    w.peers.close()
    assert w.watched[:5] == ["+5", "+6", "+7", "+9", "+10"] and w.watched[-1] == "closed"
    assert w.watched.count("-5") == 1


def test_where_none_is_silent_for_long_it_is_the_newest(w: World) -> None:
    assert w.note(5, 10, now_ns=0) == [10]
    assert w.note(11, now_ns=0) == [11] and w.peers.turned_away == 2
    assert w.note(6, now_ns=0) == [6], "as long as there are such"


def test_who_cannot_be_turned_away_stays(w: World) -> None:
    """On a unix socket, say; another goes for it, if there is one."""
    w.note(5, 6, now_ns=0)
    w.stay = {5, 10}
    assert w.note(10) == [6]
    w.stay = {11}
    assert w.note(11) == [] and w.peers.turned_away == 1


def test_what_is_left_of_who_has_ended_is_not_taken_for_who_has_its_descriptor(w: World) -> None:
    w.note(5)
    assert w.heard(given(1), 5)
    w.note(-5, 5)
    assert w.peers.gone == {given(1)}
    w.peers.forget(given(1))
    assert not w.heard(given(1), 5)
    assert w.heard(given(3), 5)
    for _ in range(2):
        assert not w.heard(given(2), 5), "it was never heard of, and came before"
    assert w.heard(b"own", 5), "it may be back"
    assert w.shut == [] and w.heard(given(4), 5) and w.peers.links[given(4)].fd == 5
    w.left = True
    w.peers.note_if_all_read()
    assert not w.heard(given(2), 5) and w.shut == []
    w.left = False
    w.peers.note_if_all_read()
    for _ in range(2):
        assert not w.heard(given(2), 5) and w.shut == [5], "now it is its own for certain"
    assert not w.heard(given(9), 5), "it is being ended"


def test_who_is_heard_by_what_has_ended_stays_unheard(w: World) -> None:
    w.note(6, -6, -7)
    for event in (6, -6):
        assert not w.heard(given(4), 6)
        w.note(event)
    assert w.heard(b"own", 8), "it came before anybody looked"
    assert w.peers.links[b"own"].fd == 8 and len(w.peers.book) == 1
