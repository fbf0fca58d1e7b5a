"""One attempt to connect after the other: what ends each, what is said of it, when the next is."""

from __future__ import annotations

from typing import cast

import pytest
import zmq
from client_core_rig import Phone

from blockflow.client.dealer import FIRST_NS, LONGEST_NS, Dealer
from blockflow.client.line import Line
from blockflow.client.names import Whereabouts
from blockflow.client.outcome import Link

S = 1_000_000_000
CLOSED, PROTOCOL, AUTH = (
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL),
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL),
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH),
)
MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


class Where:
    """Answers each question once; '' = there is no such host."""

    further, trouble, worked_at = False, "", ""

    def __init__(self, address: str = "tcp://1.1.1.1:7") -> None:
        self.address = address
        self.answers: list[str] = []

    def ask(self) -> None:
        self.answers = [self.address]

    def found(self) -> str | None:
        return self.answers.pop() if self.answers else None

    def worked(self, endpoint: str) -> None:
        self.worked_at = endpoint


class Scene:
    def __init__(self, address: str = "tcp://1.1.1.1:7") -> None:
        self.phone, self.where = Phone(), Where(address)
        self.link = Link(address, 1, 0)
        self.line = Line(cast(Dealer, self.phone), self.link, cast(Whereabouts, self.where))
        self.line.begin(0)
        self.line.on_tick(0)

    def next_is_soon(self, now: int) -> bool:
        due = self.line.next_wakeup()
        return due is not None and now + FIRST_NS <= due <= now + 2 * FIRST_NS


def test_an_attempt_of_which_nothing_comes_is_hung_up() -> None:
    s = Scene()
    assert (s.phone.endpoint, s.line.next_wakeup(), s.link.trouble) == (s.where.address, 4 * S, "")
    s.line.on_tick(4 * S - 1)
    assert s.phone.endpoint == s.where.address
    s.line.on_tick(4 * S)
    assert s.phone.endpoint == "" and "has not finished the handshake" in s.link.trouble
    assert s.next_is_soon(4 * S)


def test_a_handshake_has_its_time_and_then_all_is_well() -> None:
    s = Scene()
    assert not s.line.on_event(zmq.EVENT_CONNECTED, 0, S)
    assert s.line.next_wakeup() == 7 * S and "has not finished" in s.link.trouble
    s.line.succeeded()
    assert (s.line.next_wakeup(), s.link.trouble) == (None, "")
    assert s.where.worked_at == s.where.address
    s.link.up = True
    for kind in (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_RETRIED):  # of attempts before
        assert not s.line.on_event(kind, 0, 2 * S)
        assert (s.line.next_wakeup(), s.link.trouble) == (None, "")


@pytest.mark.parametrize(
    ("kind", "value", "denied", "refused", "said"),
    [
        (CLOSED, 0, False, False, "closed during the handshake"),
        (PROTOCOL, 0, False, True, "speaks another protocol"),
        (PROTOCOL, MECHANISM, True, True, "speaks another protocol"),
        (AUTH, 0, True, True, "authentication failed"),
    ],
)
def test_who_is_refused_is_told_why(
    kind: int, value: int, denied: bool, refused: bool, said: str
) -> None:
    """With a key that is refused there is no next attempt before somebody asks."""
    s = Scene()
    assert s.line.on_event(kind, value, S) is denied
    assert s.line.refused is refused and said in s.link.trouble
    assert s.line.next_wakeup() is None if denied else s.next_is_soon(S)
    s.line.dial()
    assert not s.line.refused and said in s.link.trouble  # until the next one has come further


def test_without_an_address_there_is_no_attempt() -> None:
    s = Scene("")
    assert s.phone.endpoint == "" and s.next_is_soon(0)


@pytest.mark.parametrize("trouble", ["", "no such host"])
def test_a_connection_that_is_given_up_waits_longest_and_the_name_is_blamed_first(
    trouble: str,
) -> None:
    s = Scene()
    s.line.succeeded()
    s.where.trouble = trouble
    s.line.leave("it sends what nobody asked for", S)
    due = s.line.next_wakeup()
    assert due is not None and due >= S + LONGEST_NS and s.phone.endpoint == ""
    assert s.link.trouble == (trouble or "it sends what nobody asked for")


def test_a_connection_that_has_ended_is_hung_up() -> None:
    s = Scene()
    s.line.succeeded()
    s.line.ended(9 * S)
    assert s.phone.endpoint == "" and s.next_is_soon(9 * S)
