"""What ends a caller's question about the tasks, besides its answer and its time; what cannot be
asked at all."""

from __future__ import annotations

from typing import Any

import pytest
from client_core_rig import DESC, connected_core, only, rid, send_all

from blockflow.client.request import task_names
from blockflow.core import limits
from blockflow.core.errors import RequestError, make_error
from blockflow.wire.client import (
    KIND_REPLY,
    Reply,
    Request,
    TaskResult,
    encode_to_client,
    encode_to_dispatcher,
)
from blockflow.wire.codec import encode

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
