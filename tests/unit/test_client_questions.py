"""What ends a caller's question about the tasks, besides its answer and its time; what cannot be
asked at all."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from client_core_rig import DESC, MS, connected_core, description, only, rid, send_all, submit

from blockflow.client.outcome import Described, Failed
from blockflow.client.request import task_names
from blockflow.core import limits
from blockflow.core.errors import RequestError, make_error
from blockflow.wire.client import (
    KIND_REPLY,
    UNASKED,
    Description,
    Reply,
    Request,
    TaskResult,
    encode_to_client,
    encode_to_dispatcher,
)
from blockflow.wire.codec import decode, encode

NEXT = limits.PROTOCOL_VERSION + 1
REFUSED = Reply(rid(5), 0, (TaskResult("*", None, make_error("UNSUPPORTED_VERSION", "another")),))


@pytest.mark.parametrize("wanted", [None, ["t"]])
@pytest.mark.parametrize(
    "answer",
    [encode([NEXT, KIND_REPLY, rid(5), 0, [], 0]), encode_to_client(REFUSED)],
    ids=["by its version", "in words"],
)
def test_a_question_that_is_refused_ends_with_the_reason(wanted: Any, answer: bytes) -> None:
    """A Dispatcher of another release does so: to wait for its tasks would not help."""
    core = connected_core()
    core.ask(rid(5), wanted, 5000, 0)
    send_all(core)
    assert only(core.on_message([answer], 0)).error.code == "UNSUPPORTED_VERSION"
    assert (core.counters.unasked, core.counters.late_replies) == (0, 0)
    assert core.on_message([answer], 0) == []
    assert core.counters.unasked == 1


def test_an_answer_to_the_client_s_own_question_was_asked_for() -> None:
    """It asks for the tasks' deadlines, where a call has none."""
    core = connected_core()
    submit(core, 1, deadline_ms=None)
    assert [m.request_id for m in send_all(core)] == [UNASKED]
    for unasked in (0, 1):
        core.on_message(description(UNASKED), 0)
        assert core.counters.unasked == unasked


def test_who_waits_for_any_task_waits_for_one() -> None:
    core = connected_core()
    core.ask(rid(5), [], 200, 0)
    send_all(core)
    assert core.on_message([encode_to_client(Description(rid(5), 1, (), {}))], 0) == []
    assert isinstance(only(core.on_message(description(rid(5)), 1)), Described)


def names_of(letter: str) -> list[str]:
    return [chr(ord(letter) + n) * limits.MAX_NAME_CHARS for n in range(16)]


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\u4e2d"])
def test_names_that_are_taken_fit_into_a_header(letter: str) -> None:
    taken = task_names(names_of(letter))
    request = Request(rid(1), taken, limits.MAX_DEADLINE_MS, DESC, (2**32 - 1, 15), 255)
    assert len(encode_to_dispatcher(request)) <= limits.MAX_HEADER_BYTES


def test_names_that_no_header_holds_are_refused_at_once() -> None:
    with pytest.raises(RequestError, match="3584 are possible") as refused:
        task_names(names_of("\U00020000"))
    assert refused.value.code == "INVALID_REQUEST"


@pytest.mark.parametrize("nbytes", [limits.MAX_CONTROL_BYTES, limits.MAX_DESCRIPTION_BYTES])
def test_what_there_is_to_tell_of_thousands_of_tasks_is_read(nbytes: int) -> None:
    """Up to its bound; whoever asked for more is told so, and no reply is as large."""
    core = connected_core()
    core.ask(rid(5), None, 5000, 0)
    raw = decode(description(rid(5))[0], max_bytes=nbytes, what="test")
    raw[5]["more"] = bytes(nbytes - len(encode(raw)) - 10)
    for more, kind in ((b"", Described), (bytes(20), Failed)):
        raw[5]["more"] += more
        core.ask(rid(5), None, 5000, 0)
        ended = kind if len(encode(raw)) > limits.MAX_DESCRIPTION_BYTES else Described
        assert isinstance(only(core.on_message([encode(raw)], 0)), ended)
    if nbytes < limits.MAX_DESCRIPTION_BYTES:
        raw[1] = KIND_REPLY
        core.ask(rid(5), None, 5000, 0)
        assert only(core.on_message([encode(raw)], 0)).error.code == "MALFORMED_MESSAGE"


def test_a_question_waits_for_the_next_connection_no_longer_than_a_request() -> None:
    """Whatever time it has: it would be told of the end only then."""
    core = connected_core()
    core.ask(rid(5), None, 60_000, 0)
    send_all(core)
    assert core.on_disconnected(MS) == []
    assert (due := core.next_wakeup()) == 1001 * MS
    assert only(core.on_tick(due)).error.code == "CONNECTION_LOST"


def test_who_waits_long_asks_rarely() -> None:
    """A thousand clients that wait for one task are no load."""
    core, now, asked = connected_core(), 0, []
    core.ask(rid(5), ["t"], 60_000, 0)
    while (wakeup := core.next_wakeup()) is not None:
        asked += [now] * len(send_all(core, now))
        now = wakeup
        core.on_tick(now)
    assert now == 60_000 * MS and 60 < len(asked) < 120
    assert asked[:3] == [0, 50 * MS, 100 * MS]
    assert max(b - a for a, b in pairwise(asked)) == 1000 * MS


def test_many_that_wait_in_one_program_ask_as_often_as_one() -> None:
    """The answer to one is an answer to all; a hundred threads took half a core."""
    core, now, asked = connected_core(), 0, []
    for n in range(1, 101):
        core.ask(rid(n), ["t"] if n % 2 else ["t", "u"], 60_000, now := n * MS)
    assert len(send_all(core, now)) == 100
    while (wakeup := core.next_wakeup()) < 1500 * MS:
        now = wakeup
        core.on_tick(now)
        asked += [now] * len(send_all(core, now))
    assert 20 < len(asked) < 30
    assert min(b - a for a, b in pairwise(asked)) >= 50 * MS
    ended = core.on_message(description(UNASKED), now)
    assert sorted(o.request_id for o in ended) == [rid(n) for n in range(1, 101, 2)]
