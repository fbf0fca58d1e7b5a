"""Whose a descriptor is, told by ends and beginnings alone; and what may be shut by it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from blockflow.dispatcher.connections import SPEAKS_NS, SURE_NS, Connections, takes_over
from blockflow.dispatcher.descriptors import Doors, mark

FD = 7


def name(count: int) -> bytes:
    return b"\0" + count.to_bytes(4)


def test_the_first_with_a_descriptor_is_clear_and_its_client_certain() -> None:
    book = Connections()
    assert not book.heard_of(FD)
    first = book.began(FD, 100, 0)
    assert first.clear and not book.unclear and book.at(FD) is first
    assert book.heard_of(FD)
    assert takes_over(name(1), first)
    first.belongs_to(name(1))
    assert first.certain and not first.doubtful(0)
    assert book.ended(FD) is first
    assert book.at(FD) is None and book.heard_of(FD)
    assert book.ended(FD) is None


def test_also_of_one_that_was_not_booked_messages_may_come() -> None:
    book = Connections()
    assert book.ended(FD) is None  # it had ended before anybody looked
    assert book.heard_of(FD)
    assert not book.began(FD, 100, 0).clear


def test_a_later_one_is_clear_when_all_was_read_after_it_was_heard_of() -> None:
    book = Connections()
    book.began(FD, 100, 0)
    book.ended(FD)
    book.all_read()  # its last messages may come after this
    second = book.began(FD, 101, 5)
    assert not second.clear and book.unclear
    second.belongs_to(name(1))
    assert not second.certain
    book.ended(FD)
    assert not book.unclear
    second = book.began(FD, 102, 5)
    assert second.doubtful(5 + SURE_NS - 1) and not second.doubtful(5 + SURE_NS)
    book.all_read()
    assert second.clear and not book.unclear
    assert not second.certain  # that message had come before
    second.belongs_to(name(1))
    assert second.certain


def test_of_two_that_may_have_it_the_later_name_does() -> None:
    book = Connections()
    book.began(FD, 100, 0)
    book.ended(FD)
    second = book.began(FD, 101, 0)
    second.belongs_to(name(2))
    assert not takes_over(name(1), second)
    assert takes_over(name(2), second) and takes_over(name(3), second)
    book.all_read()
    assert takes_over(name(1), second)  # whoever is heard from now on has it
    book.ended(FD)
    third = book.began(FD, 102, 0)
    third.belongs_to(b"mine")  # a name of its own says nothing of when it came
    assert takes_over(b"mine", third) and not takes_over(b"other", third)


def test_who_leaves_leaves_nothing_behind() -> None:
    connection = Connections().began(FD, 100, 0)
    connection.belongs_to(name(1))
    connection.leave(name(2))
    assert connection.client == name(1) and connection.certain
    connection.leave(name(1))
    assert connection.client == b"" and not connection.certain


def test_the_oldest_that_never_spoke_is_told_first() -> None:
    book = Connections()
    links = [book.began(fd, 100 + fd, fd) for fd in range(6)]
    links[1].belongs_to(name(1))
    links[1].leave(name(1))
    book.ended(2)
    late = 3 + SPEAKS_NS
    assert book.silent_for_longest(SPEAKS_NS - 1) is None, "its handshake may be under way"
    assert [book.silent_for_longest(late) for _ in range(3)] == [links[0], links[3], None]
    links[4].belongs_to(name(4))
    assert book.silent_for_longest(late + 9) is links[5]
    assert book.silent_for_longest(late + 9) is None, "nobody is told twice"


def test_those_that_were_shut_keep_their_descriptor_for_a_moment() -> None:
    book = Connections()
    links = [book.began(fd, 100 + fd, 0) for fd in range(3)]
    for _ in range(2):
        book.shut(links[1])
    assert (len(book), book.standing, links[1].ending) == (3, 2, True)
    book.ended(1)
    assert (len(book), book.standing) == (2, 2)
    book.ended(0)
    assert (len(book), book.standing) == (1, 1)


# --- what may be shut


@pytest.fixture
def files() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(files: ExitStack, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """(far end, accepted end)."""
    far = files.enter_context(socket.socket(listener.family))
    far.settimeout(5.0)
    far.connect(listener.getsockname())
    near = files.enter_context(listener.accept()[0])
    return far, near


def tcp(files: ExitStack) -> tuple[socket.socket, str]:
    listener = files.enter_context(socket.create_server(("127.0.0.1", 0)))
    return listener, f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_what_is_no_socket_has_no_mark_and_stays_open() -> None:
    door = Doors(["tcp://127.0.0.1:5755"])
    before = len(os.listdir("/proc/self/fd"))
    for fd in (os.eventfd(0), os.open(os.devnull, os.O_RDONLY)):
        assert mark(fd) is None
        assert not door.shut(fd, os.fstat(fd).st_ino)
        assert not door.turn_away(fd, os.fstat(fd).st_ino)
        os.fstat(fd)
        os.close(fd)
        assert mark(fd) is None
        assert not door.shut(fd, 1) and not door.turn_away(fd, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_the_very_connection_is_shut(files: ExitStack) -> None:
    listener, endpoint = tcp(files)
    door = Doors([endpoint])
    far, near = pair(files, listener)
    own = mark(near.fileno())
    assert own is not None and own not in (mark(far.fileno()), mark(listener.fileno()))
    before = len(os.listdir("/proc/self/fd"))
    assert not door.shut(near.fileno(), own + 1)
    far.send(b"x")
    assert near.recv(1) == b"x"
    assert door.shut(near.fileno(), own)
    assert near.recv(1) == b"" and far.recv(1) == b""
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_other_socket_of_this_process_is(files: ExitStack, tmp_path: Path) -> None:
    """Links to workers, and the far ends of clients' connections: even under their own marks."""
    _, endpoint = tcp(files)
    others, _ = tcp(files)
    unix = files.enter_context(socket.socket(socket.AF_UNIX))
    unix.bind(str(tmp_path / "worker.sock"))
    unix.listen()
    door = Doors([endpoint, f"ipc://{tmp_path}/clients.sock"])
    for far, near in (pair(files, others), pair(files, unix)):
        for end in (far, near):
            own = mark(end.fileno())
            assert own is not None
            assert not door.shut(end.fileno(), own)
            assert not door.turn_away(end.fileno(), own)
        far.send(b"x")
        assert near.recv(1) == b"x"


def test_turned_away_is_who_came_by_tcp(files: ExitStack, tmp_path: Path) -> None:
    listener, endpoint = tcp(files)
    unix = files.enter_context(socket.socket(socket.AF_UNIX))
    path = tmp_path / "clients.sock"
    unix.bind(str(path))
    unix.listen()
    door = Doors([endpoint, f"ipc://{path}"])
    far, near = pair(files, listener)
    own = mark(near.fileno())
    assert own is not None and not door.turn_away(near.fileno(), own + 1)
    assert door.turn_away(near.fileno(), own) and far.recv(1) == b""
    far, near = pair(files, unix)
    own = mark(near.fileno())
    assert own is not None and not door.turn_away(near.fileno(), own)
    assert door.shut(near.fileno(), own) and far.recv(1) == b""
