"""A connection ends, another gets its descriptor, and the first one's messages are still read."""

from __future__ import annotations

import os
import socket as std_socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from dispatcher_rig import wait_until

from blockflow.bench.fuzz import zmtp
from blockflow.dispatcher.clients import ClientPort, Sent
from blockflow.dispatcher.connections import SURE_NS
from blockflow.dispatcher.debt import CROWDED_NS, STANDSTILL_NS
from blockflow.dispatcher.descriptors import bytes_taken, mark
from blockflow.tensormq.sockets import bind_router, new_context


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


class Door:
    """A port that is read when a test says so; peers speak ZMTP by hand.

    Everything is one process: ``spare`` descriptors are kept for the peers, so that the number that
    an accepted connection had is free for the next accepted one.
    """

    def __init__(self) -> None:
        self.context = new_context()
        self.socket, (endpoint,) = bind_router(self.context, ["tcp://127.0.0.1:0"], 1 << 20, 64)
        self.port = ClientPort(self.socket, [endpoint])
        host, _, number = endpoint.removeprefix("tcp://").rpartition(":")
        self.address = host, int(number)
        self.spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
        self.peers: list[std_socket.socket] = []
        self.fds: list[int] = []

    def connect(self) -> std_socket.socket:
        os.close(self.spare.pop())
        peer = zmtp.connect(*self.address, 5.0)
        self.peers.append(peer)
        wait_until(lambda: self.accepted() > len(self.fds))
        (fd,) = self.port.watch._marks
        self.fds.append(fd)
        return peer

    def accepted(self) -> int:
        self.port.on_departures(time.monotonic_ns())
        return len(self.fds) + bool(self.port.watch._marks)

    def gone(self) -> None:
        """The connection has ended, and its descriptor is closed."""
        wait_until(lambda: self.accepted() == len(self.fds))
        wait_until(lambda: mark(self.fds[-1]) is None)

    def flush(self) -> list[tuple[bytes, Sent]]:
        self.port.on_departures(time.monotonic_ns())
        return self.port.flush(time.monotonic_ns())

    def read(self, messages: int) -> dict[bytes, int]:
        """What so many calls of the port give: messages per body."""
        found: dict[bytes, int] = {}
        for _ in range(messages):
            received = self.port.receive(time.monotonic_ns())
            if received is not None:
                body = received[1][0].bytes
                found[body] = found.get(body, 0) + 1
        return found

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        for fd in self.spare:
            os.close(fd)
        self.port.close()
        self.context.destroy(linger=0)


def lives(peer: std_socket.socket) -> bool:
    """Within a moment its connection is neither ended nor reset."""
    peer.settimeout(0.3)
    try:
        return bool(peer.recv(1))
    except TimeoutError:
        return True
    except ConnectionError:
        return False


LONG = zmtp.frame(b"", more=True) * 3000 + zmtp.frame(b"", more=False)


@pytest.mark.parametrize("told", [False, True])
def test_who_gets_the_descriptor_of_one_that_was_cut_off_stays(door: Door, told: bool) -> None:
    """The second message of the one is read when the descriptor is the other's."""
    first = door.connect()
    first.sendall(LONG + LONG)
    assert door.socket.poll(5000)
    time.sleep(0.1)  # both are there
    assert door.read(1) == {}
    assert door.port.evicted == 1
    (client,) = door.port.peers.links
    door.gone()
    if told:  # the exchange hears of it
        assert door.flush() == [(client, Sent.GONE)]
    second = door.connect()
    assert door.fds[0] == door.fds[1]
    assert door.read(20) == {}
    assert lives(second)
    assert door.port.evicted == 1
    if not told:
        assert door.flush() == [(client, Sent.GONE)]
    second.sendall(zmtp.frame(b"b", more=False))
    wait_until(lambda: door.read(1) == {b"b": 1})
    assert door.flush() == []


def test_late_messages_of_one_that_is_gone_do_no_harm_to_the_next(door: Door) -> None:
    """The Dispatcher is behind: it reads what a dead client had sent, and its successor's."""
    first = door.connect()
    first.sendall(zmtp.frame(b"a", more=False) * 60)
    assert door.socket.poll(5000)
    time.sleep(0.1)
    assert door.read(8) == {b"a": 8}
    (client,) = door.port.peers.links
    first.shutdown(std_socket.SHUT_RDWR)
    door.gone()
    assert door.flush() == [(client, Sent.GONE)]
    second = door.connect()
    assert door.fds[0] == door.fds[1]
    second.sendall(zmtp.frame(b"b", more=False) * 3)
    found = {b"a": 0, b"b": 0}
    for _ in range(60):
        for body, count in door.read(1).items():
            found[body] += count
        assert door.flush() == []
        time.sleep(0.001)
    assert found == {b"a": 0, b"b": 3}, "nobody waits for what the dead one had asked"
    assert client not in door.port.peers.links


def test_late_first_messages_neither(door: Door) -> None:
    """Nothing of the dead one was read before its successor spoke."""
    first = door.connect()
    first.sendall(zmtp.frame(b"a", more=False) * 4)
    assert door.socket.poll(5000)
    time.sleep(0.1)
    first.shutdown(std_socket.SHUT_RDWR)
    door.gone()
    second = door.connect()
    assert door.fds[0] == door.fds[1]
    second.sendall(zmtp.frame(b"b", more=False) * 4)
    time.sleep(0.1)
    found = door.read(8)
    # What comes before its successor's first word may be its successor's.
    assert found.pop(b"a", 0) < 4 and found == {b"b": 4}
    lost = door.flush()
    assert len(lost) <= 1
    (client,) = door.port.peers.links
    assert (client, Sent.GONE) not in lost
    assert door.port.send(client, [b"answer"], time.monotonic_ns()) is Sent.YES
    assert door.flush() == []


def test_who_is_silent_pays_for_nobody(door: Door) -> None:
    """The one had sent too much and gone, unread; the other has not said a word yet."""
    first = door.connect()
    first.sendall(LONG)
    assert door.socket.poll(5000)
    first.shutdown(std_socket.SHUT_RDWR)
    door.gone()
    second = door.connect()
    assert door.fds[0] == door.fds[1]
    assert door.read(20) == {}
    assert lives(second)
    assert door.port.evicted == 0
    door.flush()
    second.sendall(LONG)  # its own is laid on itself
    wait_until(lambda: door.read(1) == {} and door.port.evicted == 1)
    assert not lives(second)


@pytest.mark.parametrize("certain", [True, False])
def test_who_takes_nothing_is_cut_off_when_it_must_be_the_one(door: Door, certain: bool) -> None:
    """Its only message was read while an earlier connection's might have been still to come."""
    first = door.connect()
    first.sendall(zmtp.frame(b"a", more=False))
    assert door.socket.poll(5000)
    first.shutdown(std_socket.SHUT_RDWR)
    door.gone()
    if certain:
        assert door.read(2) == {}
    second = door.connect()
    second.sendall(zmtp.frame(b"b", more=False))
    found: dict[bytes, int] = {}
    wait_until(lambda: found.update(door.read(1)) or b"b" in found)
    link = door.port.peers.book.at(door.fds[1])
    assert link is not None and link.certain is certain
    client, body = link.client, bytes(1 << 20)
    now = link.since_ns + 1
    for _ in range(40):
        assert door.port.send(client, [body], now) in (Sent.YES, Sent.LATER)
    taken = [-1, bytes_taken(link.fd)]
    while taken[-1] != taken[-2]:  # what its kernel takes in
        time.sleep(0.05)
        taken.append(bytes_taken(link.fd))
    door.port.flush(now)
    lost = looked(door, now, now + CROWDED_NS + 1)
    assert ((client, Sent.SLOW) in lost) is certain
    if not certain:
        assert door.port.evicted == 0
        later = looked(door, now + CROWDED_NS + 1, link.since_ns + SURE_NS)
        assert (client, Sent.SLOW) in later
    assert door.port.evicted == 1
    second.settimeout(5.0)
    with suppress(ConnectionError):
        while second.recv(1 << 20):
            pass


def looked(door: Door, begin: int, end: int) -> list[tuple[bytes, Sent]]:
    """Who is lost from ``begin`` to ``end``, with a look as often as a Dispatcher that does not
    stand still has one."""
    times = [*range(begin, end, STANDSTILL_NS // 2), end]
    return [lost for now in times for lost in door.port.flush(now)]


def test_a_connection_from_before_the_monitor_is_known(door: Door) -> None:
    """Clients that wait for a new Dispatcher come as soon as its socket is bound."""
    door.port.on_departures = lambda now_ns: None  # type: ignore[method-assign]
    os.close(door.spare.pop())
    with zmtp.connect(*door.address, 5.0) as peer:
        while door.port.departures.poll(100):
            door.port.departures.recv_multipart()  # nobody has heard of it
        peer.sendall(zmtp.frame(b"a", more=False))
        wait_until(lambda: door.read(1) == {b"a": 1})
        (link,) = door.port.peers.links.values()
        assert link.certain
        peer.sendall(LONG)
        wait_until(lambda: door.read(1) == {} and door.port.evicted == 1)
        assert not lives(peer)
