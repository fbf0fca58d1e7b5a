"""What is asked before a request enters, and in which units."""

from __future__ import annotations

from typing import Any

import pytest
from recovery_rig import World

from blockflow.core.errors import RequestError
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.entrance import let_in
from blockflow.dispatcher.plan import Plan
from blockflow.wire.client import Request
from blockflow.wire.tensor import TensorDesc


def ask(w: World, admission: Admission, tries: int = 0, framed: int = 0) -> Plan:
    """An input of 16 bytes, with a second to its deadline."""
    request = Request(bytes(16), ("a",), 1000, TensorDesc("float32", (1, 4)), None, tries)
    tasks = [w.planner.task("a")]
    return let_in(admission, w.table, w.planner, b"client", request, tasks, 7, framed)


def test_what_may_have_been_done_is_not_begun_again() -> None:
    admission = Admission(8, 8, 1000)
    for once in ([], ["head_a"]):
        w = World(once=once, trunk=[1], head_a=[2])
        for tries in (0, 1):
            assert ask(w, admission, tries).absent == ""
        if not once:
            assert ask(w, admission, 2).absent == ""
            continue
        with pytest.raises(RequestError, match="'head_a' must not run twice") as e:
            ask(w, admission, 2)
        assert (e.value.code, e.value.retryable) == ("WORKER_LOST", False)
    w = World(once=["head_a"], head_a=[2])  # an outline does not know yet what its blocks are like
    assert ask(w, admission, 2).absent == "trunk"


def test_memory_is_that_of_inputs_or_of_frames_whichever_is_more() -> None:
    w, admission = World(trunk=[1], head_a=[2]), Admission(8, 8, 100)
    assert ask(w, admission, framed=84)
    with pytest.raises(RequestError, match="no room for 16 bytes"):
        ask(w, admission, framed=85)
    for _ in range(11):
        w.admit("b", "t")
    assert w.table.charged == 88
    with pytest.raises(RequestError, match="all 8 credits"):
        ask(w, admission)
    with pytest.raises(RequestError, match="no room for 16 bytes"):
        ask(w, Admission(99, 99, 100))


def test_admission_is_asked_with_what_there_is() -> None:
    class Asked(Admission):
        def decide(self, client: bytes, tasks: Any, **given: int) -> Any:
            asked.append((client, tuple(tasks), given))
            return super().decide(client, tasks, **given)

    asked: list[Any] = []
    w = World(trunk=[1], head_a=[2])
    w.admit("a")
    ask(w, Asked(8, 8, 1000))
    figures = {"inflight": 1, "of_client": 1, "charged": 8, "nbytes": 16, "now_ns": 7}
    assert asked == [(b"client", ("a",), {**figures, "budget_ns": 1_000_000_000})]
