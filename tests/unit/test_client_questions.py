"""What ends a caller's question about the tasks, besides its answer and its time."""

from __future__ import annotations

from typing import Any

import pytest
from client_core_rig import connected_core, only, rid, send_all

from blockflow.core import limits
from blockflow.core.errors import make_error
from blockflow.wire.client import KIND_REPLY, Reply, TaskResult, encode_to_client
from blockflow.wire.codec import encode

NEXT = limits.PROTOCOL_VERSION + 1
REFUSED = Reply(rid(5), 0, (TaskResult("*", None, make_error("UNSUPPORTED_VERSION", "another")),))


@pytest.mark.parametrize("wanted", [None, ["t"]])
@pytest.mark.parametrize(
    "answer", [encode([NEXT, KIND_REPLY, rid(5), 0, [], 0]), encode_to_client(REFUSED)]
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
