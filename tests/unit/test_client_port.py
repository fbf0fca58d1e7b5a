"""The clients' port over a socket that does as a test says: debts, ends, whose a connection is."""

from __future__ import annotations

from typing import Any

import pytest
import zmq

from blockflow.dispatcher import clients
from blockflow.dispatcher.clients import TRACKED_BYTES, Sent
from tests import client_port_rig
from tests.client_port_rig import LARGE, MS, A, B, Scene

s = client_port_rig.s


def test_what_a_client_does_not_take_waits_in_its_order(s: Scene) -> None:
    s.router.room = {A: 0}
    frames = [b"one"]
    assert s.port.send(A, frames, 0) is Sent.LATER
    frames[0] = b"changed"
    assert (s.port.next_look_ms(), s.port.backlog_bytes(), s.port.waiting()) == (5, 3, 1)
    s.router.room = {}
    assert s.send(A, b"two") is Sent.LATER  # not before the first one
    assert s.send(B, b"other") is Sent.YES
    assert s.port.flush(0) == []
    assert s.sent() == [(B, b"other"), (A, b"one"), (A, b"two")]
    assert (s.port.next_look_ms(), s.port.backlog_bytes(), s.port.waiting()) == (None, 0, 0)


def test_large_frames_are_owed_until_they_are_written(s: Scene) -> None:
    for _ in range(2):
        assert s.send(A, LARGE) is Sent.YES
    # the heap is looked at while large messages pass, sooner than who owes what
    assert (s.port.next_look_ms(), s.port.backlog_bytes()) == (50, 2 * TRACKED_BYTES)
    first, second = s.router.trackers
    first.done = True
    assert s.send(A, b"small") is Sent.YES
    assert s.port.backlog_bytes() == TRACKED_BYTES
    second.done = True
    assert s.port.flush(0) == []
    assert (s.port.backlog_bytes(), s.port.waiting()) == (0, 0)


def test_many_small_frames_are_owed_as_a_large_one(s: Scene) -> None:
    """A reply for many tasks."""
    half = LARGE[: TRACKED_BYTES // 2]
    assert s.send(A, b"head", half, half, half, b"end") is Sent.YES
    (tracker,) = s.router.trackers
    assert s.port.backlog_bytes() == TRACKED_BYTES + len(b"head")
    assert s.sent() == [(A, b"head", half, half, half, b"end")]
    tracker.done = True
    assert s.port.flush(0) == [] and s.port.backlog_bytes() == 0


@pytest.mark.parametrize("when", ["send", "flush"])
def test_who_is_not_there_owes_nothing(s: Scene, when: str) -> None:
    s.send(A, LARGE)
    if when == "flush":
        s.router.room = {A: 0}
        assert s.send(A, b"waits") is Sent.LATER
    s.router.gone = {A}
    if when == "send":
        assert s.send(A, b"more") is Sent.GONE
    else:
        assert s.port.flush(0) == [(A, Sent.GONE)]
    assert (s.port.backlog_bytes(), s.port.waiting(), s.port.evicted) == (0, 0, 0)


def test_who_takes_one_message_after_the_other_is_not_slow(s: Scene) -> None:
    s.router.room = {A: 0, B: 0}
    for client in (A, A, A, B):
        s.send(client, b"1234")
    lost = []
    for now_ns in range(100 * MS, 3600 * MS, 100 * MS):
        s.router.room[A] = int(now_ns % (1500 * MS) == 0)
        lost += s.port.flush(now_ns)
    assert lost == [(B, Sent.SLOW)]
    assert s.sent() == [(A, b"1234"), (A, b"1234")]
    assert (s.port.evicted, s.port.backlog_bytes()) == (1, 4)


@pytest.mark.parametrize(("keys", "cut_off_ms"), [(False, 2100), (True, 3100)])
def test_with_keys_who_takes_nothing_has_a_second_more(
    s: Scene, keys: bool, cut_off_ms: int
) -> None:
    s.port._encrypted = keys
    s.router.room = {A: 0}
    s.send(A, b"1234")
    looks = range(100 * MS, 5000 * MS, 100 * MS)
    assert next(now for now in looks if s.port.flush(now)) == cut_off_ms * MS


def test_who_owes_most_of_too_much_is_cut_off(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "OWED_BYTES", 10)
    monkeypatch.setattr(clients, "MOST_OWED_BYTES", 10)
    s.router.room = {A: 0, B: 0}
    fd = s.accepted()
    assert s.heard(b"me", fd)
    s.ended(fd)
    s.router.event(zmq.EVENT_ACCEPTED, fd)
    assert s.heard(B, fd)
    s.send(A, b"12345")
    s.send(B, b"123456")
    assert s.port.flush(0) == [(B, Sent.SLOW)]
    assert (s.port.backlog_bytes(), s.port.evicted) == (5, 1)
    s.peers[fd].setblocking(False)
    with pytest.raises(BlockingIOError):  # the connection stands: B may have had the one before
        s.peers[fd].recv(1)


def test_of_too_much_only_who_takes_nothing_is_cut_off(
    s: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "OWED_BYTES", 10)
    s.router.room = {A: 0, B: 0}
    for client in (*[A] * 7, B):
        s.send(client, b"1234567")
    lost = []
    for now_ns in range(50 * MS, 700 * MS, 50 * MS):
        s.router.room[A] = int(now_ns % (100 * MS) == 0)  # it owes more, and takes it
        found = s.port.flush(now_ns)
        assert not found or now_ns > 500 * MS
        lost += found
    assert lost == [(B, Sent.SLOW)] and s.port.backlog_bytes() == 7
    assert s.sent() == [(A, b"1234567")] * 6


def test_a_reply_that_cannot_be_sent_whole_does_not_go_on_with_the_next_clients(
    s: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have that one's name and result as its further frames."""
    send = s.router.send

    def scarce(part: Any, *args: Any, **kw: Any) -> Any:
        if part == b"no room":
            raise MemoryError
        return send(part, *args, **kw)

    monkeypatch.setattr(s.router, "send", scarce)
    with pytest.raises(MemoryError):
        s.send(A, b"head", b"no room")
    assert s.send(B, b"other", b"result") is Sent.YES
    assert s.sent() == [(A, b"head", b""), (B, b"other", b"result")]
