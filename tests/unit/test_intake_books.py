"""Intake: which rows are whose, who is refused, and that every buffer is released."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import torch

from blockflow.core.errors import RequestError, WireError
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.engine.base import EngineOptions
from blockflow.engine.echo import EchoEngine
from blockflow.tensormq.channel import Consumer
from blockflow.wire.data import (
    Data,
    Failure,
    Item,
    Withdraw,
    encode_data,
    encode_failure,
    encode_withdraw,
)
from blockflow.wire.tensor import TensorDesc
from blockflow.worker.intake import Arrival, Intake
from blockflow.worker.stage import Stage

MS = 1_000_000
NOW = 7_000 * MS
TAKES = {1: 2, 2: 3}
"""Columns that each stage takes; a message has two."""


class Buffer:
    released = 0

    def tensor(self) -> torch.Tensor:
        return torch.zeros(6, 2)

    def release(self) -> None:
        self.released += 1


class Opens:
    """A consumer that has one buffer, or cannot open it."""

    def __init__(self) -> None:
        self.buffer = Buffer()
        self.error: Exception | None = None

    def open(self, desc: TensorDesc, frame: Any) -> Buffer:
        if self.error is not None:
            raise self.error
        return self.buffer


def intake(opens: Opens) -> Intake:
    stages = {}
    for number, columns in TAKES.items():
        spec = TensorSpec("float32", ("rows", columns))
        info = BlockInfo(f"b{number}", "1", "0" * 64, "echo", Contract(spec, spec), 0, 0)
        stages[number] = Stage(StageSpec(number, info), EchoEngine(info, EngineOptions()))
    return Intake(stages, cast(Consumer, opens))


def take(
    opens: Opens, *visits: tuple[int, int], left_ms: int | Sequence[int] = 400, sent: int = NOW
) -> Arrival:
    """A message with so many rows for each stage."""
    left = [left_ms] * len(visits) if isinstance(left_ms, int) else left_ms
    items = tuple(
        Item(os.urandom(16), 1, 1, merge_paths([[stage]])[0], 0, rows, ms, task=rows + 4)
        for (stage, rows), ms in zip(visits, left, strict=True)
    )
    desc = TensorDesc("float32", (sum(rows for _, rows in visits), 2))
    header = encode_data(Data(9, sent, desc, items))
    return intake(opens).take(header, None, NOW)


def test_whose_rows_are_whose_beside_a_refused_item() -> None:
    opens = Opens()
    arrival = take(opens, (1, 1), (2, 2), (1, 3))
    assert [(t.start, t.rows, t.task) for t in arrival.tickets] == [(0, 1, 5), (3, 3, 7)]
    assert arrival.tickets[0].key != arrival.tickets[1].key
    assert arrival.tickets[0].shape == (2,)
    assert [(i.rows, e.code) for i, e in arrival.refused] == [(2, "CONTRACT_MISMATCH")]
    for n, ticket in enumerate(arrival.tickets):
        assert opens.buffer.released == 0, n
        ticket.source.release()
    assert opens.buffer.released == 1


def test_what_nobody_here_can_run_is_given_back_at_once() -> None:
    opens = Opens()
    arrival = take(opens, (2, 1), (5, 1))
    assert [e.code for _, e in arrival.refused] == ["CONTRACT_MISMATCH", "BLOCK_UNAVAILABLE"]
    assert arrival.tickets == [] and opens.buffer.released == 1


def test_a_stamp_of_another_clock_gives_no_time() -> None:
    (ticket,) = take(Opens(), (1, 1), sent=NOW + 50 * MS).tickets
    assert ticket.deadline_ns == NOW + 400 * MS and ticket.transit_ns == 0


def test_a_buffer_that_cannot_be_opened_is_nobodys_fault_when_all_are_late() -> None:
    opens = Opens()
    cases = (
        (WireError("MALFORMED_MESSAGE", "stale"), 0, "DEADLINE_EXCEEDED"),
        (WireError("MALFORMED_MESSAGE", "stale"), 400, "INTERNAL"),
        (RequestError("WORKER_LOST", "gone"), 400, "WORKER_LOST"),
    )
    for error, left_ms, code in cases:
        opens.error = error
        arrival = take(opens, (1, 1), left_ms=left_ms)
        assert [e.code for _, e in arrival.refused] == [code] and arrival.tickets == []


def test_who_is_not_late_is_told_why_the_buffer_cannot_be_opened() -> None:
    opens = Opens()
    opens.error = WireError("MALFORMED_MESSAGE", "stale")
    arrival = take(opens, (1, 1), (1, 1), left_ms=(0, 400))
    assert {e.code for _, e in arrival.refused} == {"INTERNAL"}


def test_only_what_is_no_message_for_a_worker_is_counted_as_malformed() -> None:
    one = intake(Opens())
    item = Item(os.urandom(16), 1, 1, merge_paths([[1]])[0], 0, 1, 400)
    gone = one.take(encode_withdraw(Withdraw(9, ((item.request_id, 2),))), None, NOW)
    assert gone.withdrawn == ((item.request_id, 2),) and one.malformed == 0
    failure = Failure(9, NOW, RequestError("OVERLOADED", "no"), (item,))
    for n, header in enumerate((encode_failure(failure), b"nonsense"), start=1):
        assert one.take(header, None, NOW) == Arrival() and one.malformed == n
