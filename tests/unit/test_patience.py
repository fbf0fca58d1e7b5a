"""How long the HTTP server waits for a request: pure, and with a clock that is set."""

from __future__ import annotations

import errno
import math
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from blockflow.control.rest import connections, patience
from blockflow.control.rest.connections import PatientServer
from blockflow.control.rest.patience import WHOLE_S, Clock, allowance


class TestAllowance:
    def test_nobody_waits_for_a_thread(self) -> None:
        assert allowance(0, 32) == WHOLE_S

    @pytest.mark.parametrize("threads", [1, 8, 32])
    @pytest.mark.parametrize("waiting", [1, 7, 40, 512, 10_000])
    def test_all_that_wait_have_had_a_thread_within_two_seconds(
        self, threads: int, waiting: int
    ) -> None:
        """The last of them waits for those in the threads and for those before it."""
        rounds = 1 + waiting / threads
        assert rounds * allowance(waiting, threads) <= 2.0 + 1e-9

    def test_the_more_wait_the_less_there_is(self) -> None:
        given = [allowance(n, 32) for n in (0, 1, 10, 100, 1000)]
        assert given == sorted(given, reverse=True)


class TestClock:
    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
        return now

    def test_the_time_begins_with_the_first_wait_and_goes_on(self, now: list[float]) -> None:
        clock = Clock(lambda: 10.0)
        clock.restart()
        now[0] += 50
        assert clock.left() == 10
        now[0] += 4
        assert clock.left() == 6
        now[0] += 6
        assert clock.left() <= 0
        clock.restart()
        assert clock.left() == 10

    def test_it_obeys_what_holds_now(self, now: list[float]) -> None:
        allowed = [30.0]
        clock = Clock(lambda: allowed[0])
        assert clock.left() == 30
        now[0] += 3
        allowed[0] = 2.0
        assert clock.left() < 0

    def test_what_it_was_restarted_with_is_the_most(self, now: list[float]) -> None:
        clock = Clock(lambda: 30.0)
        clock.restart(1.0)
        assert clock.left() == 1.0


class Peer:
    """A connection on which nothing has come since a moment; None: it is new."""

    def __init__(self, since: float | None) -> None:
        self.last_used = since
        self.ended: list[str] = []
        self.socket = SimpleNamespace(shutdown=self._shut)

    def _shut(self, how: int) -> None:
        assert how == socket.SHUT_RDWR
        self.ended.append("shut")
        raise OSError("it has hung up itself")

    def close(self) -> None:
        self.ended.append("closed")


class Server(PatientServer):
    """Four connections are enough for it; it has two threads, for which ``queued`` wait."""

    def __init__(self, *silent: Peer, queued: int = 0) -> None:
        self.silent, self.asked = list(silent), list[Any]()
        watched = [(n, c) for n, c in enumerate([self, *silent])]
        self._connections = SimpleNamespace(
            _selector=SimpleNamespace(connections=watched), put=self.silent.append
        )
        self.requests = SimpleNamespace(qsize=queued, max=2, put=self.asked.append)


class TestConnections:
    @pytest.fixture(autouse=True)
    def four(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "most_connections", lambda descriptors: 4)

    def test_who_says_something_gets_a_thread(self) -> None:
        server, peer = Server(*map(Peer, range(9))), Peer(3.0)
        server.process_conn(peer)
        assert server.asked == [peer] and peer.ended == []

    def test_a_new_one_is_watched(self) -> None:
        server, new = Server(*map(Peer, range(3))), Peer(None)
        server.process_conn(new)
        assert new in server.silent and server.asked == []
        assert not any(p.ended for p in server.silent)

    def test_for_each_too_many_the_one_that_is_silent_for_longest_ends(self) -> None:
        server = Server(Peer(3.0), Peer(1.0), Peer(2.0), queued=1)
        for ended in (1, 2):
            server.process_conn(Peer(None))
            assert server.silent[ended].ended == ["shut"]
            assert server.silent[ended].last_used == math.inf
            assert server.silent[0].ended == []
        assert len(server.silent) == 5

    def test_where_even_that_does_not_help_the_new_one_ends(self) -> None:
        for silent, queued in ((8, 0), (3, 5), (0, 8)):
            server, new = Server(*map(Peer, range(silent)), queued=queued), Peer(None)
            server.process_conn(new)
            assert new.ended == ["closed"] and new not in server.silent
            assert not any(p.ended for p in server.silent)

    def test_who_has_begun_is_not_ended_for_a_new_one(self) -> None:
        server, new = Server(queued=7), Peer(None)
        server.process_conn(new)
        assert server.silent == [new] and new.ended == []

    def test_the_time_of_a_queue_is_that_of_its_longest(self) -> None:
        """As it gets shorter those that are left would wait for ever longer turns."""
        server = Server()
        assert server.allowance() == WHOLE_S
        for queued, counts in ((4, 4), (10, 10), (3, 10), (0, 0), (1, 1)):
            server.requests.qsize = queued
            assert server.allowance() == allowance(counts, 2)


def test_what_nobody_took_is_given_up_with_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a finalizer, which would have its say on stderr otherwise (Python 3.13)."""
    monkeypatch.setattr(patience, "WHOLE_S", 0.0)
    ours, theirs = socket.socketpair()
    writer = patience.PatientWriter(ours, Clock(lambda: 0.0), 1 << 16)
    with theirs, pytest.raises(TimeoutError):
        writer.write(b"an answer")
    with pytest.raises(TimeoutError):
        writer.flush()  # it is still to be sent
    ours.close()
    writer.close()
    assert writer.closed


def test_a_connection_that_there_is_no_room_for_is_not_tried_for_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It goes on waiting at the door, and every look finds it: that would keep a core busy."""

    def accept(_door: Any) -> Any:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    monkeypatch.setattr(connections.wsgi.Server, "prepare", lambda _: None)
    slept: list[float] = []
    monkeypatch.setattr(connections, "time", SimpleNamespace(sleep=slept.append), raising=False)
    server: Any = Server()
    server._connections._from_server_socket = accept
    server.prepare()
    with pytest.raises(OSError, match="Too many open files"):
        server._connections._from_server_socket(None)
    assert slept == [0.1]
