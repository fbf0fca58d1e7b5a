"""Intake: what a message becomes in a worker, and until when its requests may be started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.engine.base import EngineOptions
from blockflow.engine.echo import EchoEngine
from blockflow.tensormq.channel import InBuffer
from blockflow.tensormq.shm import ShmConsumer
from blockflow.wire.data import Data, Item, encode_data
from blockflow.wire.tensor import TensorDesc
from blockflow.worker.intake import Intake, deadline_of
from blockflow.worker.stage import Stage

MS = 1_000_000
SENT = 7_000 * MS
SPEC = TensorSpec("float32", ("rows", 2))
INFO = BlockInfo("b", "1", "0" * 64, "echo", Contract(SPEC, SPEC), 0, 0)


def an_item(remaining_ms: int) -> Item:
    return Item(os.urandom(16), 1, 1, merge_paths([[1]])[0], 0, 1, remaining_ms)


@pytest.mark.parametrize(
    ("under_way_ms", "transit_ms", "left_ms"),
    [
        pytest.param(0, 0, 400, id="at once"),
        pytest.param(370, 370, 30, id="late: that was its own time"),
        pytest.param(900, 900, -500, id="too late"),
        pytest.param(-5, 0, 400, id="a stamp of another clock"),
    ],
)
def test_time_under_way_is_the_requests_own(
    under_way_ms: int, transit_ms: int, left_ms: int
) -> None:
    stages = {1: Stage(StageSpec(1, INFO), EchoEngine(INFO, EngineOptions()))}
    intake = Intake(stages, ShmConsumer(Path()))
    message = Data(9, SENT, TensorDesc("float32", (1, 2)), (an_item(400),))
    now = SENT + under_way_ms * MS
    (ticket,) = intake.take(encode_data(message), bytes(8), now).tickets
    assert ticket.transit_ns == transit_ms * MS
    assert ticket.deadline_ns == now + left_ms * MS


class Refuses(ShmConsumer):
    def __init__(self, error: BlockFlowError) -> None:
        super().__init__(Path())
        self.error = error

    def open(self, desc: TensorDesc, frame: Any | None) -> InBuffer:
        raise self.error


@pytest.mark.parametrize(
    ("code", "told"),
    [("NO_SPACE", "NO_SPACE"), ("WORKER_LOST", "WORKER_LOST"), ("MALFORMED_MESSAGE", "INTERNAL")],
)
def test_what_cannot_be_opened_is_told_as_what_it_is_and_never_the_clients_fault(
    code: str, told: str
) -> None:
    message = Data(9, SENT, TensorDesc("float32", (1, 2)), (an_item(400),))
    intake = Intake({}, Refuses(make_error(code, "why", hint="do", where="/run/arena-7")))
    ((_, error),) = intake.take(encode_data(message), None, SENT).refused
    assert (error.code, error.message, error.hint) == (told, "why", "do")
    assert (error.where == "/run/arena-7") is (code == "WORKER_LOST")
    assert intake.malformed == 1


@given(
    deadline_ms=st.integers(1, limits.MAX_DEADLINE_MS),
    hops=st.lists(
        st.tuples(st.integers(0, 3000 * MS), st.integers(0, 3000 * MS)), min_size=1, max_size=30
    ),
)
def test_over_many_hops_no_deadline_is_later_than_the_first(
    deadline_ms: int, hops: list[tuple[int, int]]
) -> None:
    """Each hop rounds the time left down: up to a millisecond is lost with each, and never won."""
    true = deadline = SENT + deadline_ms * MS
    now = SENT
    for n, (work, transit) in enumerate(hops, start=1):
        sent = now + work
        if sent >= deadline:
            return  # it has expired there
        now = sent + transit
        deadline = deadline_of(an_item((deadline - sent) // MS), sent, now)
        assert true - n * MS < deadline <= true
