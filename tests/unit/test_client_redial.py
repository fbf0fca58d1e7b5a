"""When a client connects again: later each time, and not all of them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import pytest
import zmq
from client_core_rig import Phone

from blockflow.client import names
from blockflow.client.dealer import FIRST_NS, LONGEST_NS, Dealer, Redial
from blockflow.client.line import Line
from blockflow.client.names import Whereabouts
from blockflow.client.outcome import Link

MS = 1_000_000


def waits(redial: Redial, count: int) -> list[int]:
    """From each failure to the next attempt, when every attempt fails at once."""
    out, now = [], 0
    for _ in range(count):
        redial.failed(now)
        assert redial.due_ns is not None
        out.append(redial.due_ns - now)
        now = redial.due_ns
        redial.dialled()
    return out


def constant(value: float) -> Callable[[], float]:
    return lambda: value


def test_attempts_become_rarer_up_to_a_bound() -> None:
    least = waits(Redial(constant(0.0)), 8)
    assert least[0] == FIRST_NS
    assert least[-1] == LONGEST_NS
    assert all(later == min(2 * sooner, LONGEST_NS) for sooner, later in pairwise(least))


def test_chance_adds_up_to_as_much_again() -> None:
    assert waits(Redial(constant(0.5)), 2) == [FIRST_NS * 3 // 2, FIRST_NS * 3]
    assert len({waits(Redial(), 1)[0] for _ in range(20)}) > 1


def test_a_name_s_other_addresses_are_tried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "resolve", lambda host: ["1.1.1.1", "[2::2]"])
    rung = threading.Event()
    where = Whereabouts("tcp://host:7", lambda act: (act(), rung.set()))
    phone, now, tried, waited = Phone(), 0, [], []
    line = Line(cast(Dealer, phone), Link("tcp://host:7", 1, 0), where)
    line.begin(now)
    for _ in range(8):
        assert rung.wait(20)
        rung.clear()
        line.on_tick(now)
        tried.append(phone.endpoint)
        line.on_event(zmq.EVENT_CONNECT_RETRIED, 0, now)
        due = line.next_wakeup()
        assert due is not None
        waited.append(due - now)
        now = due
        line.on_tick(now)
    assert tried == ["tcp://1.1.1.1:7", "tcp://[2::2]:7"] * 4
    assert all(FIRST_NS <= wait <= 2 * FIRST_NS for wait in waited[::2])
    assert all(wait >= FIRST_NS << n for n, wait in enumerate(waited[1::2]))


def test_an_end_that_is_told_twice_is_one() -> None:
    redial = Redial(constant(0.0))
    redial.failed(100 * MS)
    redial.failed(120 * MS)
    assert redial.due_ns == 100 * MS + FIRST_NS
    assert not redial.is_due(redial.due_ns - 1)
    assert redial.is_due(redial.due_ns)
    redial.dialled()
    assert redial.due_ns is None
    assert not redial.is_due(1 << 62)


def test_after_a_connection_it_is_soon_again() -> None:
    redial = Redial(constant(0.0))
    waits(redial, 8)
    redial.failed(0)
    redial.succeeded()
    assert redial.due_ns is None
    assert waits(redial, 1) == [FIRST_NS]


def test_an_attempt_is_overdue_until_something_came_of_it() -> None:
    redial = Redial(constant(0.0))
    redial.dialled(100 * MS)
    assert not redial.is_overdue(100 * MS - 1)
    assert redial.is_overdue(100 * MS) and not redial.is_due(100 * MS)
    redial.failed(100 * MS)
    assert not redial.is_overdue(1 << 62)
    assert redial.is_due(100 * MS + FIRST_NS)
    redial.dialled(300 * MS)
    redial.succeeded()
    assert not redial.is_overdue(1 << 62) and not redial.is_due(1 << 62)
