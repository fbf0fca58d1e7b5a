"""What those who have gone had sent: thrown away, and nobody else pays for it."""

from __future__ import annotations

import pytest
import zmq

from blockflow.dispatcher import clients, past
from blockflow.dispatcher.clients import Sent
from blockflow.dispatcher.debt import SLOW_CLIENT_NS
from tests import client_port_rig
from tests.client_port_rig import MS, A, B, Scene

s = client_port_rig.s


def name(count: int) -> bytes:
    return b"\0" + count.to_bytes(4)


def heard(s: Scene) -> list[bytes]:
    """Of whom the next call tells."""
    received = s.port.receive(0)
    return [] if received is None else [received[0]]


def test_what_one_that_has_gone_left_costs_no_round(s: Scene) -> None:
    fd, other = s.accepted(), s.accepted()
    assert s.heard(A, fd)
    assert s.ended(fd) == [(A, Sent.GONE)]
    for _ in range(5):
        s.router.said(A, fd)
    s.router.said(B, other)
    assert heard(s) == [B], "in the same call"
    assert s.port.present == (B,)
    assert heard(s) == []


def test_also_of_one_that_nobody_had_heard(s: Scene) -> None:
    fd = s.accepted()
    s.ended(fd)
    for _ in range(3):
        s.router.said(A, fd)
    assert heard(s) == [] and not s.router.inbox
    s.router.event(zmq.EVENT_ACCEPTED, fd)  # its number, again
    assert s.heard(B, fd)
    assert not s.heard(A, fd)
    assert s.port.present == (B,)


def test_also_of_one_that_is_being_ended_before_it_is_heard(s: Scene) -> None:
    """It was turned away: no answer would reach it."""
    fd = s.accepted()
    s.port.on_departures(0)
    connection = s.port.peers.book.at(fd)
    assert connection is not None
    s.port.peers.book.shut(connection)
    assert not s.heard(A, fd)
    assert s.port.present == ()
    assert s.ended(fd) == []


def test_of_more_than_are_remembered_the_connection_tells(
    s: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past, "REMEMBERED", 2)
    fds = {name(count): s.accepted() for count in range(10, 20)}
    for client, fd in fds.items():
        assert s.heard(client, fd)
    for fd in fds.values():
        s.ended(fd)
    for client, fd in fds.items():
        assert not s.heard(client, fd)


def test_so_many_at_once(s: Scene) -> None:
    fd = s.accepted()
    s.ended(fd)
    many = clients._THROWN_AWAY_AT_ONCE
    for _ in range(many + 1):
        s.router.said(A, fd)
    assert heard(s) == [] and len(s.router.inbox) == 2, "others are to be served as well"
    s.router.said(A, fd, *[b""] * 9)
    s.router.said(B, s.accepted())
    assert heard(s) == [], "one of many frames is as long as many"
    assert heard(s) == [B]


@pytest.mark.parametrize("same", [True, False], ids=["same descriptor", "another"])
def test_who_names_itself_and_is_back_is_heard_at_once(s: Scene, same: bool) -> None:
    fd = s.accepted()
    assert s.heard(b"me", fd)
    assert s.ended(fd) == [(b"me", Sent.GONE)]
    assert not s.heard(b"me", fd), "left by the connection that has ended"
    if same:
        s.router.event(zmq.EVENT_ACCEPTED, fd)
    else:
        fd = s.accepted()
    assert s.heard(b"me", fd) and s.port.present == (b"me",)
    assert s.send(b"me", b"answer") is Sent.YES


def test_one_that_names_itself_is_not_taken_for_one_that_has_gone(s: Scene) -> None:
    """A dead one's message is read late, by the descriptor that it has now."""
    fd = s.accepted()
    s.ended(fd)
    s.router.event(zmq.EVENT_ACCEPTED, fd)
    assert s.heard(b"me", fd)
    assert s.heard(A, fd), "it may be its own"
    assert s.heard(b"me", fd)


def test_who_cannot_be_reached_is_not_heard(s: Scene) -> None:
    fd = s.accepted()
    assert s.heard(A, fd)
    s.router.gone = {A}
    assert s.send(A, b"answer") is Sent.GONE
    assert not s.heard(A, fd)


def test_one_that_had_gone_with_a_full_queue_is_cut_off_once(s: Scene) -> None:
    """ZeroMQ goes on saying that it takes nothing, until all that it had sent is read."""
    fd = s.accepted()
    assert s.heard(A, fd)
    s.port.peers.links.clear()  # nobody knows which connection was its
    s.router.room = {A: 0}
    sent: list[Sent] = []
    for now_ns in range(0, 4 * SLOW_CLIENT_NS, 100 * MS):
        s.router.said(A, fd)
        if s.port.receive(now_ns) is not None:
            s.port.peers.links.clear()
            sent.append(s.send(A, b"answer", now_ns=now_ns))
        assert s.port.flush(now_ns) == []
    assert set(sent[:-1]) == {Sent.LATER} and sent[-1] is Sent.SLOW
    assert s.port.evicted == 1
    assert s.port.backlog_bytes() == 0


def test_who_was_cut_off_in_doubt_and_speaks_on_sees_its_connection_end(
    s: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "OWED_BYTES", 5)
    monkeypatch.setattr(clients, "MOST_OWED_BYTES", 5)
    fd = s.accepted()
    s.ended(fd)
    s.router.event(zmq.EVENT_ACCEPTED, fd)
    assert s.heard(A, fd)
    s.router.room = {A: 0}
    s.send(A, b"123456")
    assert s.port.flush(0) == [(A, Sent.SLOW)]
    s.peers[fd].setblocking(False)
    with pytest.raises(BlockingIOError):  # it may have been an earlier one's
        s.peers[fd].recv(1)
    assert heard(s) == []  # all is read: from now on it is its own
    assert not s.heard(A, fd)
    assert s.peers[fd].recv(1) == b""
    assert s.port.evicted == 1


def test_when_the_last_to_be_read_is_refused_all_is_read(s: Scene) -> None:
    """Nobody would look a second time, and who has the number now stayed in doubt."""
    fd, other = s.accepted(), s.accepted()
    s.ended(fd)
    s.router.event(zmq.EVENT_ACCEPTED, fd)
    s.port.peers.note(0)
    s.router.said(b"n" * 256, other)
    s.router.said(b"n" * 256, other)
    assert heard(s) == [] and s.port.peers.book.unclear
    assert heard(s) == [] and not s.port.peers.book.unclear
