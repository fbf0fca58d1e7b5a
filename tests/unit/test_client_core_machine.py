"""The client's protocol core, whatever comes in whatever order: one outcome per request."""

from __future__ import annotations

from typing import Any

import pytest
from client_core_rig import (
    BODY,
    DESC,
    MS,
    connected_core,
    description,
    new_core,
    reply,
    rid,
    send_all,
    submit,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from blockflow.client.outcome import Outcome
from blockflow.core.errors import RequestError
from blockflow.wire.client import Describe, Request, decode_to_dispatcher
from blockflow.wire.codec import encode


@given(st.binary(max_size=200))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_survived(data: bytes) -> None:
    assert connected_core().on_message([data], 0) == []


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(0, 2**63)
    | st.text(max_size=5)
    | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@given(st.sampled_from([20, 21, 10, 99]), st.lists(PLAIN, max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_message_of_the_right_envelope_is_survived(kind: int, rest: list[Any]) -> None:
    core = connected_core()
    submit(core, 1)
    send_all(core)
    core.on_message([encode([1, kind, rid(1), *rest])], 0)


@pytest.mark.parametrize(
    "fields", [{"problems": 3}, {"code": 7}, {"details": []}, {"problems": [1]}]
)
def test_any_error_is_survived(fields: dict[str, Any]) -> None:
    core = connected_core()
    submit(core, 1)
    send_all(core)
    error = {"code": "INVALID_TOPOLOGY", "message": ""} | fields
    core.on_message([encode([1, 20, rid(1), 0, [["t", None, error, [], [], 0, 0, 0]]])], 0)


class OneOutcomeEach(RuleBasedStateMachine):
    """Whatever happens in whatever order: one outcome per request, and none is left in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.core = new_core(max_pending=20)
        self.now = 0
        self.next_id = 1
        self.open: set[bytes] = set()
        self.sent: set[bytes] = set()

    def took(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            assert outcome.request_id in self.open
            self.open.remove(outcome.request_id)

    @rule(deadline=st.sampled_from([None, 10, 1000]))
    def submit(self, deadline: int | None) -> None:
        n = rid(self.next_id)
        self.next_id += 1
        if len(self.open) == 20:
            with pytest.raises(RequestError, match="OVERLOADED"):
                self.core.submit(n, ("t",), DESC, BODY, deadline, self.now)
        else:
            self.core.submit(n, ("t",), DESC, BODY, deadline, self.now)
            self.open.add(n)

    @rule(n=st.integers(1, 30))
    def send(self, n: int) -> None:
        for _ in range(n):
            message = self.core.next_message(self.now)
            if message is None:
                return
            self.core.sent(message[2])
            msg = decode_to_dispatcher(message[0])
            if isinstance(msg, Request):
                assert msg.request_id in self.open
                self.sent.add(msg.request_id)
            elif isinstance(msg, Describe):
                self.took(self.core.on_message(description(msg.request_id), self.now))

    @rule(n=st.integers(1, 40))
    def answer(self, n: int) -> None:
        was_open = rid(n) in self.open
        outcomes = self.core.on_message(reply(n), self.now)
        assert bool(outcomes) == was_open
        self.took(outcomes)

    @rule(n=st.integers(1, 40))
    def cancel(self, n: int) -> None:
        self.took(self.core.cancel(rid(n)))

    @rule()
    def connect(self) -> None:
        if not self.core.link.up:
            self.core.on_connected()

    @rule()
    def disconnect(self) -> None:
        self.took(self.core.on_disconnected(self.now))

    @rule(ms=st.integers(1, 1500))
    def wait(self, ms: int) -> None:
        self.now += ms * MS
        self.took(self.core.on_tick(self.now))

    @invariant()
    def the_core_agrees(self) -> None:
        assert len(self.core._pending) == len(self.open)

    def teardown(self) -> None:
        self.now += 200_000 * MS
        self.took(self.core.on_tick(self.now))
        assert not self.open
        assert len(self.core._pending) == 0


OneOutcomeEach.TestCase.settings = settings(max_examples=40, deadline=None)
TestOneOutcomeEach = OneOutcomeEach.TestCase
