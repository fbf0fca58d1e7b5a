"""The clients' port over a socket that does as a test says: debts, ends, whose a connection is."""

from __future__ import annotations

import errno
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from blockflow.dispatcher import clients
from blockflow.dispatcher.clients import TRACKED_BYTES, ClientPort, Sent
from blockflow.dispatcher.connections import SURE_NS
from blockflow.dispatcher.debt import SLOW_CLIENT_NS

A, B = b"\0" + (1).to_bytes(4), b"\0" + (2).to_bytes(4)
"""As ZeroMQ names its peers, in this order."""
LARGE = bytes(TRACKED_BYTES)
MS = 1_000_000


class Tracker:
    """Of a large frame."""

    done = False


class Frame:
    """One that has come on a descriptor."""

    def __init__(self, content: bytes, more: bool, fd: int) -> None:
        self.bytes, self.more, self._fd = content, more, fd

    def __len__(self) -> int:
        return len(self.bytes)

    def get(self, option: int) -> int:
        assert option == zmq.SRCFD
        return self._fd


class Router:
    """Peers in ``gone`` are not there; those in ``room`` take so many more messages."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()
        self.room: dict[bytes, int] = {}
        self.sent: list[list[bytes]] = []
        self.trackers: list[Tracker] = []
        self.inbox: deque[Frame] = deque()
        self.events: deque[list[bytes]] = deque()
        self._inside = False

    def send(self, part: Any, flags: int, copy: bool = True, track: bool = False) -> Tracker | None:
        if not self._inside:
            if part in self.gone:
                raise zmq.ZMQError(errno.EHOSTUNREACH)
            if self.room.get(part) == 0:
                raise zmq.Again
            if part in self.room:
                self.room[part] -= 1
            self.sent.append([])
        self.sent[-1].append(bytes(part))
        self._inside = bool(flags & zmq.SNDMORE)
        if not track:
            return None
        self.trackers.append(Tracker())
        return self.trackers[-1]

    def recv(self, flags: int, copy: bool) -> Frame:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def poll(self, timeout: int) -> int:
        return len(self.inbox)

    def get_monitor_socket(self, events: int) -> Monitor:
        return Monitor(self.events)

    def disable_monitor(self) -> None:
        """Nothing is to be undone."""

    close = disable_monitor

    def said(self, client: bytes, fd: int, *frames: bytes) -> None:
        parts = [client, *(frames or (b"hello",))]
        self.inbox += [Frame(p, i < len(parts), fd) for i, p in enumerate(parts, 1)]

    def event(self, kind: int, fd: int) -> None:
        self.events.append([struct.pack("=hi", kind, fd), b""])


class Monitor:
    def __init__(self, events: deque[list[bytes]]) -> None:
        self._events = events

    def poll(self, timeout: int) -> int:
        return len(self._events)

    def recv_multipart(self, flags: int) -> list[bytes]:
        return self._events.popleft()

    def close(self, linger: int) -> None:
        """Nothing is to be undone."""


class Scene:
    """A port, and connections to it that the kernel knows."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.router = Router()
        path = str(folder / "clients.sock")
        self._stack = stack
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(path)
        self._listener.listen()
        self.port = ClientPort(cast(Any, self.router), [f"ipc://{path}"])
        stack.callback(self.port.close)
        self.peers: dict[int, socket.socket] = {}

    def accepted(self) -> int:
        """A descriptor of a new connection."""
        peer = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        peer.settimeout(5)
        peer.connect(self._listener.getsockname())
        fd = self._stack.enter_context(self._listener.accept()[0]).fileno()
        self.peers[fd] = peer
        self.router.event(zmq.EVENT_ACCEPTED, fd)
        return fd

    def ended(self, fd: int, now_ns: int = 0) -> list[tuple[bytes, Sent]]:
        """ZeroMQ says so; what :meth:`flush` makes of it."""
        self.router.event(zmq.EVENT_DISCONNECTED, fd)
        self.port.on_departures(now_ns)
        return self.port.flush(now_ns)

    def heard(self, client: bytes, fd: int, now_ns: int = 0) -> bool:
        """It has said something; whether anybody is told."""
        self.router.said(client, fd)
        return self.port.receive(now_ns) is not None

    def send(self, client: bytes, *frames: bytes, now_ns: int = 0) -> Sent:
        return self.port.send(client, frames, now_ns)

    def sent(self) -> list[tuple[bytes, ...]]:
        """Messages, without the large frames' content."""
        found = [tuple(b"L" if f == LARGE else f for f in m) for m in self.router.sent]
        self.router.sent.clear()
        return found


@pytest.fixture
def s(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, stack)


# --- debts ----------------------------------------------------------------------------------------


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
        assert s.send(A, b"head", LARGE) is Sent.YES
    assert (s.port.next_look_ms(), s.port.backlog_bytes()) == (100, 2 * TRACKED_BYTES)
    first, second = s.router.trackers
    first.done = True
    assert s.send(A, b"small") is Sent.YES
    assert s.port.backlog_bytes() == TRACKED_BYTES
    second.done = True
    assert s.port.flush(0) == []
    assert (s.port.backlog_bytes(), s.port.waiting()) == (0, 0)


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
    for client in (A, A, A, A, A, B):
        s.send(client, b"1234567")
    lost = []
    for now_ns in range(50 * MS, 500 * MS, 50 * MS):
        s.router.room[A] = int(now_ns % (100 * MS) == 0)  # it owes more, and takes it
        found = s.port.flush(now_ns)
        assert not found or now_ns > 250 * MS
        lost += found
    assert lost == [(B, Sent.SLOW)] and s.port.backlog_bytes() == 7
    assert s.sent() == [(A, b"1234567")] * 4


# --- connections ----------------------------------------------------------------------------------


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
    assert s.heard(A, fd)  # said before its end, and read only now
    assert s.port.present == ()
    assert s.heard(B, fd)
    assert s.heard(A, fd)
    assert s.port.present == (B,)
    assert s.ended(fd) == [(B, Sent.GONE)]


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
    assert s.port.receive(0) is not None
    unclear = s.port._book.at(other)
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
    assert s.port._links[B].certain


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
    s.port.watch = cast(
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
    s.port.look(9, 100)
    assert seen == [(fd, 7), (9, 104, True)]  # five bytes and two before them
    assert s.port._book.at(later) is not None


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
