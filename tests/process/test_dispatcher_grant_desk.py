"""The Dispatcher's desk for granted memory by itself, with a clock of the test."""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grants_rig
import pytest
import zmq
from grants_rig import DOWN, UP, Side
from refusals_rig import no_descriptor

from blockflow.core import limits
from blockflow.dispatcher import grants
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


def test_few_may_be_silent_at_once(desk: GrantDesk, sides: list[Side]) -> None:
    path, token, _ = desk.invite(b"a", 0)
    for _ in range(17):
        sides.append(Side(path))
        serve(desk)
    assert sides[16].closed() and desk.events == {"refused": 1}
    sides[0].say(Attach(token))
    serve(desk)
    sides.append(Side(path))  # one is a stranger no more
    serve(desk)
    assert desk.events == {"refused": 1} and desk.gauges()["clients"] == 1


def test_who_is_attached_may_be_silent(desk: GrantDesk, sides: list[Side]) -> None:
    path, token, _ = desk.invite(b"a", 0)
    sides.append(Side(path))
    sides[0].say(Attach(token))
    serve(desk)
    assert desk.next_due() is None
    desk.tick(2 * TOKEN_NS)
    assert desk.gauges()["clients"] == 1 and desk.events == {}


def test_first_it_says_who_it_is_and_once(desk: GrantDesk, sides: list[Side]) -> None:
    path, token, _ = desk.invite(b"a", 0)
    sides += [Side(path), Side(path)]
    sides[0].say(Ask(UP, 1 << 20))
    serve(desk)
    assert sides[0].closed() and desk.events == {"malformed": 1}
    sides[1].say(Attach(token))
    serve(desk)
    sides[1].say(Attach(desk.invite(b"a", 0)[1]))
    serve(desk)
    assert sides[1].closed() and desk.events == {"malformed": 1, "refused": 1}


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


def test_of_a_clients_invitations_the_last_one_holds(desk: GrantDesk, sides: list[Side]) -> None:
    tokens = [desk.invite(b"a", 0)[1] for _ in range(2)]
    for token in tokens:
        sides.append(Side(str(desk._path)))
        sides[-1].say(Attach(token))
        serve(desk)
    assert sides[0].closed() and desk.events == {"refused": 1}
    assert desk.gauges()["clients"] == 1


def test_invitations_are_bounded_until_they_are_too_old(desk: GrantDesk) -> None:
    reasons = [desk.invite(b"%d" % n, 0)[2] for n in range(65)]
    assert reasons[:-1] == [""] * 64 and "too many clients" in reasons[-1]
    assert "too many clients" in desk.invite(b"late", TOKEN_NS - 1)[2]
    assert desk.invite(b"late", TOKEN_NS)[2] == ""


def test_the_end_of_one_client_is_no_others(desk: GrantDesk, sides: list[Side]) -> None:
    """Though the descriptor of its side connection is the other's by now."""
    for name in (b"a", b"b"):
        path, token, _ = desk.invite(name, 0)
        sides.append(Side(path))
        sides[-1].say(Attach(token))
        serve(desk)
        if name == b"a":
            (fd,) = desk._sides
            sides[-1].close()
            serve(desk)
    assert list(desk._sides) == [fd]
    desk.client_gone(b"a")
    assert desk.gauges()["clients"] == 1


def test_what_may_be_granted_follows_from_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PHYS_PAGES": 1 << 20, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert grants._most_bytes() == 1 << 30
    pages["SC_PHYS_PAGES"] <<= 10
    assert grants._most_bytes() == limits.MAX_GRANTED_BYTES
    for soft, most in ((400, 100), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, n=soft: (n, n))
        assert grants._most_descriptors() == most


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
    for user, group, same in ((4711, 1, True), (1, 4711, False)):
        who = struct.pack("3i", 4711, user, group)
        peer = SimpleNamespace(getsockopt=lambda *_, who=who: who)
        assert grants._same_user(cast(socket.socket, peer)) is same


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
    assert due is not None and due > 0
    assert desk.events == {"refused": 1}
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

    with monkeypatch.context() as m:
        m.setattr(os, "memfd_create", no_descriptor)
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
