"""Peers that connect and say nothing: they go when somebody else needs the descriptor, or soon."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator

import pytest
import zmq
from dispatcher_rig import wait_until

from blockflow.bench.fuzz import zmtp
from blockflow.dispatcher.clients import ClientPort
from blockflow.dispatcher.connections import SPEAKS_NS
from blockflow.tensormq import sockets
from blockflow.tensormq.curve import Gatekeeper, as_client
from blockflow.tensormq.keys import ClientKeys, KeyPair
from blockflow.tensormq.sockets import bind_router, new_context

FEW = 5
SPARE = 8 * FEW
SERVER, CLIENT = KeyPair.make(), KeyPair.make()


class Hall:
    """A port by TCP, with keys or without."""

    def __init__(self, *, keys: bool) -> None:
        self.context = new_context()
        protect = None
        if keys:
            keeper = Gatekeeper(self.context)
            protect = keeper.protect("clients", SERVER, lambda key: key == CLIENT.public)
        self.keys = keys
        self.socket, (self.endpoint,) = bind_router(
            self.context, ["tcp://127.0.0.1:0"], protect=protect
        )
        self.port = ClientPort(self.socket, [self.endpoint], encrypted=keys)
        self.late_ns = 0
        self.peers: list[socket.socket] = []
        # They have theirs first: descriptors that become free are for accepted connections.
        self.spare = [socket.socket() for _ in range(SPARE)]

    def connect(self) -> socket.socket:
        peer = self.spare.pop()
        self.peers.append(peer)
        peer.settimeout(5.0)
        peer.connect(zmtp.place(self.endpoint))
        return peer

    def silent(self, said: bytes = b"") -> socket.socket:
        """One that says at most half a greeting."""
        before = self.known()
        peer = self.connect()
        peer.sendall(said)
        wait_until(lambda: self.known() > before or self.port.peers.turned_away)
        return peer

    def known(self) -> int:
        """Connections that were heard of."""
        self.port.on_departures(time.monotonic_ns() + self.late_ns)
        return len(self.port.peers.book._present)

    def full(self) -> None:
        """From now on a new connection gets one of the last descriptors, and those that are here
        have had their time."""
        self.known()
        self.port.peers._last_fd = max(self.port.peers.book._present)
        self.late_ns = 60 * SPEAKS_NS

    def served(self) -> bytes:
        """What a client says that comes now; it speaks by ZeroMQ itself."""
        dealer = self.context.socket(zmq.DEALER)
        try:
            dealer.set(zmq.LINGER, 0)
            if self.keys:
                as_client(ClientKeys(CLIENT, SERVER.public))(dealer)
            dealer.connect(self.endpoint)
            dealer.send(b"hello")
            found: list[bytes] = []

            def heard() -> bool:
                self.known()
                received = self.port.receive(time.monotonic_ns() + self.late_ns)
                if received is not None:
                    found.append(received[1][0].bytes)
                return bool(found)

            wait_until(heard)
            return found[0]
        finally:
            dealer.close()

    def close(self) -> None:
        for peer in (*self.peers, *self.spare):
            peer.close()
        self.port.close()
        self.context.destroy(linger=0)


@pytest.fixture(params=[False, True], ids=["plain", "keys"])
def hall(request: pytest.FixtureRequest) -> Iterator[Hall]:
    hall = Hall(keys=request.param)
    yield hall
    hall.close()


def ended(peer: socket.socket) -> bool:
    """Whether its connection is over; what it was told before is read."""
    peer.setblocking(False)
    try:
        while peer.recv(1024):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_the_oldest_that_never_spoke_makes_room_for_who_comes(hall: Hall) -> None:
    silent = [hall.silent(zmtp.GREETING[: 5 * (n % 2)]) for n in range(FEW)]
    hall.full()
    assert hall.served() == b"hello"
    wait_until(lambda: ended(silent[0]))
    assert [ended(peer) for peer in silent[1:]] == [False] * (FEW - 1)
    assert hall.port.peers.turned_away == 1


def test_of_a_burst_no_more_stay_than_there_is_room_for(hall: Hall) -> None:
    """Also when what comes next gets a descriptor that has become free."""
    for _ in range(FEW):
        hall.silent()
    hall.full()
    for _ in range(3):
        begun = hall.port.peers.turned_away
        for _ in range(2 * FEW):  # nobody looks meanwhile
            hall.connect()

        def all_seen(most: int = begun + 2 * FEW) -> bool:
            return hall.known() == FEW and hall.port.peers.turned_away == most

        wait_until(all_seen)
        hall.late_ns += 60 * SPEAKS_NS
    assert sum(not ended(peer) for peer in hall.peers) == FEW


def test_new_ones_have_their_time(hall: Hall) -> None:
    silent = [hall.silent() for _ in range(FEW)]
    hall.full()
    hall.late_ns = -60 * SPEAKS_NS  # nobody's is over
    newest = hall.silent()
    wait_until(lambda: ended(newest))
    assert not any(map(ended, silent)) and hall.port.peers.turned_away == 1


def test_who_has_spoken_stays_and_the_newest_goes() -> None:
    hall = Hall(keys=False)
    try:
        host, number = zmtp.place(hall.endpoint)
        spoke = [zmtp.connect(host, number, 5.0) for _ in range(FEW)]
        hall.peers += spoke
        found = []
        for peer in spoke:
            peer.sendall(zmtp.frame(b"hello", more=False))

        def heard() -> bool:
            received = hall.port.receive(time.monotonic_ns())
            if received is not None:
                found.append(received[0])
            return len(found) == FEW

        wait_until(heard)
        hall.full()
        newest = hall.silent()
        wait_until(lambda: ended(newest))
        assert not any(map(ended, spoke)) and hall.port.peers.turned_away == 1
    finally:
        hall.close()


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "keys"])
def test_a_handshake_has_an_end(monkeypatch: pytest.MonkeyPatch, keys: bool) -> None:
    """Nothing, half a greeting, or all of it and no more: ZeroMQ itself would wait for 30 s."""
    assert sockets.HANDSHAKE_MS == 5000
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 200)
    hall = Hall(keys=keys)
    try:
        hall.port.peers._last_fd = math.inf
        whole = zmtp.greeting(b"CURVE" if keys else b"NULL")
        begin = time.monotonic()
        peers = [hall.silent(said) for said in (b"", whole[:11], whole)]
        wait_until(lambda: all(map(ended, peers)), 20.0)
        assert time.monotonic() - begin < 20.0
        assert hall.port.peers.turned_away == 0
    finally:
        hall.close()
