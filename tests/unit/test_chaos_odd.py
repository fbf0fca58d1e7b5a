"""Chaos: requests that cannot be answered, cancellations, poison, and clients behind a network that
fails: what excuses them and what does not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from chaos_rig import ledger, rid

from blockflow.bench.chaos.faults import (
    FRAGILE,
    POISONED,
    RESET,
    STALL_S,
    STALLED,
    Injected,
    Injector,
)
from blockflow.bench.chaos.findings import BEHIND_S, Findings
from blockflow.bench.chaos.ledger import CANCELLED, NO_REPLY, OK, POISON, Ledger
from blockflow.bench.chaos.plan import KINDS, Fault
from blockflow.bench.chaos.proxy import Proxy
from blockflow.bench.chaos.report import recoveries
from blockflow.bench.chaos.wire import WireTap

BAD = frozenset({"CONTRACT_MISMATCH"})
FICKLE = frozenset({CANCELLED, OK})


def book_of(
    outcome: str, wanted: frozenset[str], *, far: bool = False, done_s: float = 50.5
) -> Ledger:
    """A hundred good requests and this one, due at 51."""
    book = ledger()
    book.sent(rid(500), "a", 50.0, 1.0, wanted, far=far)
    book.carried(rid(500), 7)
    book.done(rid(500), outcome, done_s)
    return book


# --- what cannot be answered ----------------------------------------------------------------------


def test_a_bad_input_gets_its_error_or_is_refused() -> None:
    assert Findings(book_of("CONTRACT_MISMATCH", BAD)).violations() == []
    assert Findings(book_of("OVERLOADED", BAD)).violations() == []
    assert book_of("CONTRACT_MISMATCH", BAD).odd() == {"CONTRACT_MISMATCH": 1}
    assert book_of("OVERLOADED", BAD).odd() == {}


def test_a_bad_input_that_is_answered_is_a_violation() -> None:
    said = Findings(book_of(OK, BAD)).violations()
    assert said == ["1 requests ended with OK, and should not be"]


@pytest.mark.parametrize("outcome", ["INTERNAL", "EMPTY_INPUT", CANCELLED])
def test_another_error_than_its_own_is_a_violation(outcome: str) -> None:
    assert f"1 requests ended with {outcome}" in Findings(book_of(outcome, BAD)).violations()


def test_a_good_request_is_no_bad_input() -> None:
    said = Findings(ledger(("a", 0.0, 0.1, "CONTRACT_MISMATCH"))).violations()
    assert said == ["1 requests ended with CONTRACT_MISMATCH"]


def test_what_cannot_be_answered_is_no_part_of_what_is_served() -> None:
    book = ledger(("a", 0.0, 0.1, "NOT_READY"), good=1)
    for number in range(500, 600):
        book.sent(rid(number), "a", 0.0, 1.0, BAD)
        book.done(rid(number), "CONTRACT_MISMATCH", 0.1)
    assert book.answered == 0.5
    assert book.served((0.0, 1.0)) == (1, 2)


# --- cancellations --------------------------------------------------------------------------------

NOBODY_SAID = ["1 cancelled requests got no reply"]


def test_who_cancels_gets_a_reply_too() -> None:
    book = book_of(CANCELLED, FICKLE)
    assert Findings(book).violations() == NOBODY_SAID
    book.replied(rid(500), 7, 50.6)
    assert Findings(book).violations() == []
    book.replied(rid(500), 7, 50.7)
    assert Findings(book).violations() == ["1 requests ended twice"]


def test_the_answer_may_be_faster() -> None:
    book = ledger()
    book.sent(rid(500), "a", 50.0, 1.0, FICKLE)
    book.carried(rid(500), 7)
    book.replied(rid(500), 7, 50.1)
    book.done(rid(500), CANCELLED, 50.1)
    assert Findings(book).violations() == []


def test_a_connection_takes_the_replies_to_what_was_cancelled_with_it() -> None:
    other = book_of(CANCELLED, FICKLE)
    other.broke(6)
    assert Findings(other).violations() == NOBODY_SAID
    other.broke(7)
    assert Findings(other).violations() == []


def test_the_tap_tells_which_connection_broke() -> None:
    """Every client has connections of its own, and none of another's number."""
    book = Ledger()
    taps = [WireTap(book, threading.Lock(), lambda: 10.0) for _ in range(2)]
    numbers = {tap._connection for tap in taps}
    for tap in taps:
        tap.disconnected()
    assert numbers == book._breaks.keys()
    assert len(numbers) == 2


# --- poison ---------------------------------------------------------------------------------------


def test_a_poison_is_blamed_and_a_mate_is_not() -> None:
    sent = Injected(50.1, POISONED, ("a",), "")
    assert Findings(book_of(POISON, frozenset({POISON})), [sent]).violations() == []
    blamed = ["1 requests were blamed without two deaths"]
    mate = ledger(("a", 50.0, 51.0, POISON))
    assert Findings(mate, [sent]).violations() == blamed
    # Alone at work when its worker was killed, and beside the poison before: that makes two.
    assert not Findings(mate, [sent, Injected(50.6, "worker killed", ("a",), "")]).violations()
    assert recoveries(Findings(ledger(("a", 50.2, 50.3, OK)), [sent])) == {}


def crashes(*ages_s: float) -> dict[str, Any]:
    return {"stages": [{"block": FRAGILE}], "crashes": [{"age_s": age} for age in ages_s]}


@pytest.mark.parametrize(
    ("workers", "done"),
    [([crashes()], True), ([crashes(1.0, 99.0)], True), ([crashes(1.0, 9.0)], False), ([], False)],
)
def test_a_poison_never_makes_its_block_fail_for_good(workers: list[Any], done: bool) -> None:
    """It costs two deaths, and five within a minute are too many."""
    system: Any = SimpleNamespace(
        client_endpoint="", commands=SimpleNamespace(workers=lambda: workers)
    )
    sent: list[str] = []

    def poison() -> str:
        sent.append(POISON)
        return POISON

    injector = Injector(system, {"tasks": {}}, lambda: 0.0, 1, poison=poison)
    (kind,) = (k for k in KINDS if k.name == POISONED)
    injected = injector.inject(Fault(0.0, kind, 0.5))
    injector.close()
    assert bool(sent) == (injected.tasks == (FRAGILE,)) == done
    assert injected.note.startswith("not done") != done


# --- a network that fails -------------------------------------------------------------------------

LOST = ["1 requests got no reply, though somebody was there to reply"]


@pytest.mark.parametrize("kind", [RESET, STALLED])
def test_who_is_behind_the_network_is_excused_while_it_fails(kind: str) -> None:
    cut = [Injected(50.0, kind, (), "1 connections")]
    plain = frozenset({OK})
    far, near = (book_of(NO_REPLY, plain, far=f, done_s=51.1) for f in (True, False))
    assert Findings(far).violations() == Findings(near, cut).violations() == LOST
    assert Findings(far, cut).violations() == []
    before = [Injected(51.05 - STALL_S - BEHIND_S, kind, (), "1 connections")]
    assert Findings(far, before).violations() == LOST
    late = ["1 requests ended later than their deadline allows"]
    far, near = (book_of("WORKER_LOST", plain, far=f, done_s=52.0) for f in (True, False))
    assert Findings(far).slow() == Findings(near, cut).slow() == late
    assert Findings(far, cut).slow() == []


class Pair:
    """A connection through a proxy."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10.0)
        host, port = self.listener.getsockname()
        self.proxy = Proxy(f"tcp://{host}:{port}")
        self.ends: list[socket.socket] = []

    def connect(self) -> tuple[socket.socket, socket.socket]:
        host, _, port = self.proxy.endpoint.removeprefix("tcp://").rpartition(":")
        near = socket.create_connection((host, int(port)), timeout=10.0)
        far, _ = self.listener.accept()
        far.settimeout(10.0)
        self.ends += [near, far]
        near.sendall(b".")  # when it has passed, the proxy knows of the connection
        assert far.recv(1) == b"."
        return near, far

    def close(self) -> None:
        self.proxy.close()
        for one in (*self.ends, self.listener):
            one.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_a_proxy_passes_bytes_both_ways_until_it_resets(pair: Pair) -> None:
    near, far = pair.connect()
    for source, sink, data in ((near, far, b"ask" * 50_000), (far, near, b"answer")):
        sending = threading.Thread(target=source.sendall, args=(data,))
        sending.start()
        got = b""
        while len(got) < len(data):
            got += sink.recv(1 << 16)
        sending.join()
        assert got == data
    assert pair.proxy.reset() == 1
    for one in (near, far):
        with pytest.raises(ConnectionResetError):
            one.recv(1)
    again, other = pair.connect()
    again.sendall(b"x")
    assert other.recv(1) == b"x"
    assert pair.proxy.connections == 2


def test_a_proxy_holds_and_loses_nothing(pair: Pair) -> None:
    near, far = pair.connect()
    begin = time.monotonic()
    assert pair.proxy.hold(0.3) == 1
    near.sendall(b"x")
    assert far.recv(1) == b"x"
    assert time.monotonic() - begin >= 0.3


def test_who_ends_a_connection_ends_both_sides(pair: Pair) -> None:
    near, far = pair.connect()
    near.close()
    assert far.recv(1) == b""


def test_nobody_behind_the_proxy_is_as_nobody_at_all(pair: Pair) -> None:
    """A Dispatcher that is away: its clients try again."""
    pair.listener.close()
    host, _, port = pair.proxy.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as near:
        assert near.recv(1) == b""
