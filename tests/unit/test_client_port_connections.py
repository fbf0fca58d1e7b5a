"""Whose connection is whose: who has gone, who is back, who is cut off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from blockflow.dispatcher.clients import Sent
from blockflow.dispatcher.connections import SURE_NS
from blockflow.dispatcher.debt import SLOW_CLIENT_NS
from tests import client_port_rig
from tests.client_port_rig import MS, A, B, Scene

s = client_port_rig.s


def test_whose_connection_ends_is_gone(s: Scene) -> None:
    fd, other = s.accepted(), s.accepted()
    s.router.events.clear()  # as of those that come before anybody is told of any
    assert s.heard(A, fd) and s.heard(B, other)
    assert s.port.present == (A, B)
    s.router.event(zmq.EVENT_DISCONNECTED, fd)
    s.port.on_departures(0)
    assert (s.port.waiting(), s.port.next_look_ms()) == (1, 5)
    assert s.port.flush(0) == [(A, Sent.GONE)]
    assert (s.port.waiting(), s.port.present) == (0, (B,))


def test_what_is_left_of_an_ended_connection_is_not_its_successors(s: Scene) -> None:
    fd = s.accepted()
    assert s.heard(A, fd)
    assert s.ended(fd) == [(A, Sent.GONE)]
    s.router.event(zmq.EVENT_ACCEPTED, fd)  # the same number again
    assert not s.heard(A, fd)  # said before its end, and read only now
    assert s.port.present == ()
    assert s.heard(B, fd)
    assert not s.heard(A, fd)
    assert s.port.present == (B,)
    assert s.ended(fd) == [(B, Sent.GONE)]


def test_it_is_its_successors_for_certain_once_nothing_more_waits(
    s: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a round of the Dispatcher sees it, that reads nothing in vain."""
    monkeypatch.setattr(zmq, "zmq_poll", lambda polled, timeout: list(s.router.inbox))
    fd = s.accepted()
    assert s.heard(A, fd)
    assert s.ended(fd) == [(A, Sent.GONE)]
    s.router.event(zmq.EVENT_ACCEPTED, fd)
    s.router.said(B, fd)
    assert s.heard(B, fd)
    assert s.port.more() and s.port.peers.book.unclear
    assert s.port.receive(0) is not None
    assert not s.port.more() and not s.port.peers.book.unclear
    assert s.heard(B, fd) and s.port.peers.links[B].certain


def test_who_was_taken_for_the_owner_of_anothers_connection_is_gone(s: Scene) -> None:
    fd = s.accepted()
    assert s.heard(b"me", fd)
    assert s.ended(fd) == [(b"me", Sent.GONE)]
    s.router.event(zmq.EVENT_ACCEPTED, fd)
    assert s.heard(b"me", fd)  # said before its end; but it may have come back
    assert s.port.present == (b"me",)
    assert s.heard(B, fd)
    assert s.port.flush(0) == [(b"me", Sent.GONE)]
    assert s.port.present == (B,)


def test_who_names_itself_may_come_back(s: Scene) -> None:
    first, second = s.accepted(), s.accepted()
    assert s.heard(b"me", first) and s.heard(b"me", second)
    assert s.ended(first) == []
    assert s.port.present == (b"me",)
    assert s.ended(second) == [(b"me", Sent.GONE)]
    third = s.accepted()
    assert s.heard(b"me", third)
    s.router.event(zmq.EVENT_DISCONNECTED, third)
    s.port.on_departures(0)
    assert s.heard(b"me", s.accepted())  # before anybody has looked who is gone
    assert s.port.flush(0) == []


def test_a_name_that_is_too_long_ends_its_connection(s: Scene) -> None:
    fd, name = s.accepted(), b"n" * 256
    assert not s.heard(name, fd)
    assert s.peers[fd].recv(1) == b""
    assert s.port.evicted == 1
    assert s.ended(fd) == [(name, Sent.GONE)]


def test_a_connection_that_may_be_anothers_is_left_alone(s: Scene) -> None:
    fd = s.accepted()
    assert s.heard(A, fd)
    s.ended(fd)
    s.router.event(zmq.EVENT_ACCEPTED, fd)
    s.router.said(b"n" * 256, fd)  # it may have been said before
    s.router.said(B, fd)
    assert s.port.receive(0) is None
    assert s.port.receive(0) is not None
    assert s.port.evicted == 0
    assert s.port.receive(0) is None  # all was read: from now on it is its own
    assert not s.heard(b"n" * 256, fd)
    assert s.port.evicted == 1


def test_a_message_that_is_too_long_ends_its_connection(s: Scene) -> None:
    fd, other = s.accepted(), s.accepted()
    assert s.heard(B, other)
    s.ended(other)
    s.router.event(zmq.EVENT_ACCEPTED, other)
    s.router.said(B, other)  # so that it is not known yet whose the second one is
    s.router.said(A, fd, *[b""] * 3000)
    s.port.on_departures(0)
    unclear = s.port.peers.book.at(other)
    assert unclear is not None and not unclear.clear
    for _ in range(2):  # there is more of it than is thrown away at once
        assert s.port.receive(0) is None
        assert not unclear.clear
    assert (s.port.evicted, s.peers[fd].recv(1)) == (1, b"")
    assert s.port.next_look_ms() == 50  # to give back what it took
    assert s.port.receive(0) is None
    assert unclear.clear


def test_a_later_connection_is_its_own_once_nothing_is_left_to_read(s: Scene) -> None:
    fd = s.accepted()
    assert s.heard(A, fd)
    s.router.event(zmq.EVENT_DISCONNECTED, fd)
    s.router.event(zmq.EVENT_ACCEPTED, fd)
    s.port.on_departures(0)
    assert s.heard(B, fd)
    assert s.port.peers.links[B].certain


def test_who_may_have_had_another_connection_is_not_cut_off_yet(s: Scene) -> None:
    first, second = s.accepted(), s.accepted()
    assert s.heard(A, second)
    s.ended(second)
    assert s.heard(b"me", first)
    s.router.room = {b"me": 0}
    s.send(b"me", b"waits")
    late, sure = SLOW_CLIENT_NS - 100 * MS, SLOW_CLIENT_NS - 100 * MS + SURE_NS
    lost = []
    for now_ns in range(100 * MS, sure + 200 * MS, 100 * MS):
        if now_ns == late:
            s.router.event(zmq.EVENT_ACCEPTED, second)
            assert s.heard(b"me", second, now_ns)  # or A has said that
        lost += s.port.flush(now_ns)
        assert (now_ns >= sure) == bool(lost)
    assert lost == [(b"me", Sent.SLOW)]
    assert s.peers[second].recv(1) == b""


def test_the_watch_knows_what_was_read_and_what_is_held(s: Scene) -> None:
    seen: list[Any] = []
    s.port.watch.close()
    s.port.watch = s.port.peers.watch = cast(
        Any,
        SimpleNamespace(
            delivered=lambda *a: seen.append(a),
            began=lambda *a: None,
            due=lambda now_ns: True,
            look=lambda *a, drained: seen.append((*a, drained)),
            close=lambda: None,
        ),
    )
    fd = s.accepted()
    assert s.heard(A, fd)
    s.router.room = {A: 0}
    s.send(A, b"1234")
    later = s.accepted()
    s.port.look(9, lambda: 100)
    assert seen == [(fd, 7), (9, 104, 0, True)]  # five bytes and two before them
    assert s.port.peers.book.at(later) is not None


def test_who_was_cut_off_is_not_heard_any_more(s: Scene) -> None:
    fd = s.accepted()
    assert s.heard(A, fd)
    s.router.room = {A: 0}
    s.send(A, b"waits")
    lost: list[tuple[bytes, Sent]] = []
    for now_ns in range(100 * MS, SLOW_CLIENT_NS + 300 * MS, 100 * MS):
        lost += s.port.flush(now_ns)
    assert lost == [(A, Sent.SLOW)]
    assert s.peers[fd].recv(1) == b""
    assert not s.heard(A, fd)
    assert s.ended(fd) == []
