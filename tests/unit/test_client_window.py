"""What waits in the client for the Dispatcher to read: how many bytes are under way, and until when
those behind them wait."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from client_core_rig import (
    BODY,
    MS,
    connected_core,
    description,
    only,
    reply,
    rid,
    send_all,
    submit,
)

from blockflow.client.core import GRACE_NS, ClientCore
from blockflow.client.outcome import Failed
from blockflow.core import limits
from blockflow.wire.client import UNASKED, Cancel, Describe, Request
from blockflow.wire.codec import encode

SIZE = len(BODY)


@pytest.fixture(autouse=True)
def two_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many requests fill the window."""
    monkeypatch.setattr(limits, "MAX_UNANSWERED_BYTES", 2 * SIZE)


def sent(core: ClientCore, now: int = 0) -> list[int]:
    """Which requests leave."""
    return [m.request_id[-1] for m in send_all(core, now) if isinstance(m, Request)]


def full(*more: int) -> ClientCore:
    """Requests 1 and 2 have left; those after them wait."""
    core = connected_core()
    for n in (1, 2, *more):
        submit(core, n)
    assert sent(core) == [1, 2]
    return core


def test_unread_bytes_are_bounded() -> None:
    """The Dispatcher cuts off who leaves it too much to read."""
    core = full(3, 4)
    assert only(core.on_message(reply(1), 1))
    assert sent(core) == [3]
    core.on_disconnected(2)  # nothing of it waits anywhere
    core.on_connected()
    assert sent(core) == [4]
    for n in (5, 6, 7):
        submit(core, n)
    assert sent(core) == [5]
    assert only(core.on_message(reply(4), 3))
    assert sent(core) == [6]


def test_a_reply_says_that_all_before_it_was_read() -> None:
    core = full(3, 4, 5)
    assert only(core.on_message(reply(2), 1))
    assert sent(core) == [3, 4]


@pytest.mark.parametrize(("late", "go_on"), [(1, [3]), (2, [3, 4])])
@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_what_nobody_waits_for_is_under_way_all_the_same(
    how: str, late: int, go_on: list[int]
) -> None:
    """Its bytes are in the socket until the Dispatcher has read them, which its reply tells."""
    core, now = full(), 1000 * MS + GRACE_NS
    if how == "cancelled":
        core.cancel(rid(1))
        core.cancel(rid(2))
    else:
        assert len(core.on_tick(now)) == 2
    for n in (3, 4):
        submit(core, n, now=now)
    assert send_all(core, now) == [Cancel(rid(1)), Cancel(rid(2))]
    assert core.on_message(reply(late), now) == []
    assert sent(core, now) == go_on


def test_an_answer_that_cannot_be_read_is_one_too() -> None:
    core = full(3)
    assert isinstance(only(core.on_message([encode([1, 20, rid(1)])], 0)), Failed)
    assert sent(core) == [3]


def ends(core: ClientCore, n: int) -> int:
    """When request ``n`` ends if no answer comes, in milliseconds."""
    while (due := core.next_wakeup()) is not None:
        if any(outcome.request_id == rid(n) for outcome in core.on_tick(due)):
            return due // MS
    raise AssertionError("it does not end")


@pytest.mark.parametrize("own_ms", [300, 60_000])
@pytest.mark.parametrize("told", ["before", "after"])
def test_what_waits_behind_others_has_its_tasks_own_deadline(own_ms: int, told: str) -> None:
    core = connected_core()
    submit(core, 1, deadline_ms=60_000)
    submit(core, 2, deadline_ms=60_000)
    assert sent(core) == [1, 2]
    if told == "before":
        core.on_message(description(UNASKED, deadline_ms=own_ms), 0)
    submit(core, 3, deadline_ms=60_000)
    submit(core, 4, deadline_ms=None)
    asked = send_all(core)
    if told == "after":
        assert asked == [Describe(UNASKED)]
        core.on_message(description(UNASKED, deadline_ms=own_ms), 0)
    assert ends(core, 4) == own_ms


def steps(act: Callable[[], object]) -> int:
    """How many instructions of the interpreter ``act`` takes."""
    count, before, collects = 0, sys.gettrace(), gc.isenabled()

    def trace(frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    gc.disable()  # what it may find of others' has steps of its own
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def test_how_many_wait_costs_nothing() -> None:
    """The window is looked at with each request and each reply: never through all that wait."""
    few, many = full(3), full(*range(3, 50))
    assert steps(lambda: few.next_message(0)) == steps(lambda: many.next_message(0)) > 0
