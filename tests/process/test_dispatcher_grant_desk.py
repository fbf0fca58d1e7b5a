"""The Dispatcher's desk for granted memory by itself, with a clock of the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grants_rig
import pytest
import zmq
from grants_rig import DOWN, UP, Side

from blockflow.dispatcher.grants import TOKEN_NS, GrantDesk
from blockflow.tensormq.grants import GrantBook
from blockflow.wire.grants import Ask, Attach, Granted, Refused

sides = grants_rig.sides


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[GrantDesk]:
    made = GrantDesk(tmp_path / "g.sock", zmq.Poller(), GrantBook(max_clients=2))
    yield made
    made.close()
    made.close()
    assert list(tmp_path.iterdir()) == []


def serve(desk: GrantDesk, now_ns: int = 0) -> None:
    """Handle what has come until nothing more comes."""
    while events := dict(desk._poller.poll(0)):
        for fd in events:
            desk.on_event(fd, now_ns)


def test_who_says_nothing_is_closed(desk: GrantDesk, sides: list[Side]) -> None:
    path, token, reason = desk.invite(b"a", 5)
    assert (len(token), reason) == (16, "")
    assert desk.next_due() is None
    side = Side(path)
    sides.append(side)
    serve(desk, 10)
    assert desk.next_due() == 10 + TOKEN_NS
    desk.tick(9 + TOKEN_NS)
    side.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        side.socket.recv(1)
    desk.tick(10 + TOKEN_NS)
    assert side.closed()
    assert desk.next_due() is None
    # The token is too old by now, too.
    late = Side(path)
    sides.append(late)
    late.say(Attach(token))
    serve(desk, 10 + TOKEN_NS)
    assert late.closed()
    assert desk.events == {"silent": 1, "refused": 1}


def test_who_is_given_up_is_not_invited_any_more(desk: GrantDesk, sides: list[Side]) -> None:
    path, token, _ = desk.invite(b"a", 0)
    _, other, _ = desk.invite(b"b", 0)
    desk.client_gone(b"a")
    for shown in (token, other):
        sides.append(Side(path))
        sides[-1].say(Attach(shown))
        serve(desk)
    assert sides[0].closed() and desk.events == {"refused": 1}
    assert desk.gauges()["clients"] == 1


def test_no_more_clients_than_the_book_takes(desk: GrantDesk, sides: list[Side]) -> None:
    ways = [desk.invite(name, 0) for name in (b"a", b"b", b"c")]
    for path, token, _ in ways:
        side = Side(path)
        sides.append(side)
        side.say(Attach(token))
        serve(desk)
    assert sides[2].closed()
    assert desk.gauges()["clients"] == 2
    assert "2 clients" in desk.invite(b"d", 0)[2]
    sides[0].close()
    serve(desk)
    assert desk.invite(b"d", 0)[2] == ""


def test_other_users_are_not_served(
    desk: GrantDesk, sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, token, _ = desk.invite(b"a", 0)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    side = Side(path)
    sides.append(side)
    serve(desk)
    assert side.closed()
    assert desk.events == {"refused": 1}
    assert token


def test_without_descriptors_it_looks_away_and_comes_back(
    desk: GrantDesk, sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, token, _ = desk.invite(b"a", 0)
    side = Side(path)
    sides.append(side)
    side.say(Attach(token))
    listener = desk._listener

    class Empty:
        def accept(self) -> None:
            raise OSError(24, "Too many open files")

        def fileno(self) -> int:
            assert listener is not None
            return listener.fileno()

    desk._listener = Empty()  # type: ignore[assignment]
    serve(desk, 0)  # ends: the readable listener is not looked at any more
    due = desk.next_due()
    assert due is not None
    desk._listener = listener
    desk.tick(due)
    assert desk.next_due() is None
    serve(desk, due)
    assert desk.gauges()["clients"] == 1


def test_memory_that_cannot_be_made_is_refused_and_not_counted(
    desk: GrantDesk, sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, token, _ = desk.invite(b"a", 0)
    side = Side(path)
    sides.append(side)
    side.say(Attach(token))
    side.say(Ask(UP, 1 << 20))

    def full(*_: int) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as m:
        m.setattr(os, "memfd_create", full)
        serve(desk)
    refused = side.answer()
    assert isinstance(refused, Refused)
    assert "Too many open files" in refused.reason
    assert desk.gauges()["bytes"] == 0
    side.say(Ask(UP, 1 << 20))
    serve(desk)
    assert isinstance(side.answer(), Granted)


def test_descriptors_are_left_for_others(
    desk: GrantDesk, sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk._most_descriptors = 2
    for name in (b"a", b"b"):
        path, token, _ = desk.invite(name, 0)
        side = Side(path)
        sides.append(side)
        side.say(Attach(token))
        side.say(Ask(UP, 1 << 20))
        side.say(Ask(DOWN, 1 << 20))
        serve(desk)
    assert isinstance(sides[0].answer(), Granted)
    assert "descriptor" in sides[0].answer().reason
    assert sides[1].closed()


def test_a_taken_path_switches_it_off_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    path.write_text("in the way")
    desk = GrantDesk(path, zmq.Poller())
    assert "no side socket" in desk.reason
    assert desk.invite(b"a", 0) == ("", b"", desk.reason)
    desk.close()
    assert path.exists()
