"""What an executor counts of all that it takes and gives, and what it tells others of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lanes_rig import LATE, MS, SPEC, Bench

from blockflow.control.rest.shapes import properties
from blockflow.core.errors import BlockFlowError, RequestError
from blockflow.core.metrics import StageKpi
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.wire.data import PROBE_EPOCH, Item
from blockflow.worker.intake import Arrival
from blockflow.worker.ticket import Batch, Source, Ticket


def ticket(
    key: int, *, rows: int = 1, epoch: int = 1, path: Sequence[int] = (1,), **source: Any
) -> Ticket:
    """For stage 1, received at 0."""
    item = Item(os.urandom(16), 1, epoch, merge_paths([path])[0], 0, rows, 1000)
    read = Source("float32", (2,), 1, tensor=torch.zeros(rows, 2), **source)
    return Ticket(key, item, 1, read, 0, 0, 0, 0, LATE, 0)


def receive(bench: Bench, arrival: Arrival, at: int = 0) -> None:
    for n, one in enumerate(arrival.tickets):
        bench.sink.keys[one.item.request_id] = n
    executor = cast(Any, bench.executor)
    executor._intake = SimpleNamespace(take=lambda header, frame, now: arrival)
    bench.executor.receive(b"", None, at)


def test_what_is_refused_at_the_door_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    item = ticket(1).item
    bench.sink.keys[item.request_id] = 1
    receive(bench, Arrival(refused=[(item, RequestError("BLOCK_UNAVAILABLE", "not here"))]))
    assert bench.sink.failed == {1: "BLOCK_UNAVAILABLE"} and bench.executor.idle


@pytest.mark.parametrize("epoch", [1, PROBE_EPOCH])
def test_rows_bytes_and_copies_are_counted_but_for_a_probe(
    epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch, slots=1)
    hits: list[str] = []
    points = bench.executor._failpoints
    points.armed["after_output"] = ("raise", "")
    monkeypatch.setattr(points, "hit", lambda *names: hits.extend(names))
    receive(bench, Arrival([ticket(1, rows=3, epoch=epoch)]))
    batch = bench.expect(1)
    batch.copies = 2
    bench.compute(batch)
    bench.executor.accounts.settle()
    meter = bench.stages[1].meter
    counted = (meter.requests, meter.rows, meter.bytes_out, meter.copies_out)
    came = sum(meter.arrived._buckets.values())
    if epoch == PROBE_EPOCH:
        assert counted == (0, 0, 0, 0) and came == 0 and hits == []
    else:
        assert counted == (1, 3, 8, 2) and came == 3 and hits == ["after_output", "b1"]


def test_bytes_of_who_has_failed_are_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their place in the slot is there, but no message names it."""
    bench = Bench(monkeypatch, slots=1, policy="window")
    receive(bench, Arrival([ticket(1, rows=3), ticket(2, rows=1)]))
    batch = bench.expect(1)
    batch.errors[1] = RequestError("BLOCK_FAILED", "not this one")
    bench.compute(batch)
    bench.executor.accounts.settle()
    meter = bench.stages[1].meter
    assert (meter.requests, meter.rows, meter.failed_rows, meter.bytes_out) == (1, 1, 3, 2)
    receive(bench, Arrival([ticket(3)]))
    batch = bench.expect(1)
    batch.errors[3] = RequestError("BLOCK_FAILED", "nor this")
    bench.compute(batch)
    bench.executor.accounts.settle()
    assert (meter.failures, meter.bytes_out) == (2, 2)


def test_inputs_go_back_before_the_output_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets it may send the next input at once."""
    bench = Bench(monkeypatch)
    sent: list[int] = []
    one = ticket(1, on_release=lambda: sent.append(len(bench.sink.sent)))
    receive(bench, Arrival([one]))
    bench.compute(bench.expect(1))
    assert sent == [0] and len(bench.sink.sent) == 1


def test_waiting_begins_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the intake took is overhead."""
    bench = Bench(monkeypatch)
    bench.clock.now = 7
    one = ticket(1)
    receive(bench, Arrival([one]), at=5)
    assert one.ready_ns == 7


def test_all_of_a_batch_that_is_given_up_have_failed_at_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, timeout_ms=(20, 0, 0), policy="window")
    told: list[tuple[int, BlockFlowError]] = []

    def fail(items: Sequence[Item], error: BlockFlowError) -> None:
        told.append((len(items), error))

    monkeypatch.setattr(bench.sink, "fail", fail)
    receive(bench, Arrival([ticket(1), ticket(2)]))
    batch: Batch = bench.expect(1)
    assert len(batch.tickets) == 2
    assert bench.executor.give_up_overdue(20 * MS)
    ((count, error),) = told
    assert (count, error.where) == (2, "b1") and "20 ms" in error.message
    assert bench.stages[1].meter.failures == 2


def test_who_is_late_has_failed_and_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.arrive(1, 1, deadline=5)
    bench.clock.now = 5
    assert bench.start() is None
    meter = bench.stages[1].meter
    assert (meter.expired, meter.failures, meter.requests) == (1, 1, 0)
    assert meter.failed_rows == 0  # as its description says: rows are of batches that were computed
    meaning = properties(StageKpi, {})
    assert "expired" in meaning["failures"]["description"]
    assert "in batches that were computed" in meaning["failed_rows"]["description"]


def test_only_who_is_too_large_together_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, slots=2, policy="window")

    asked: list[Sequence[int]] = []

    def reserve(dtype: str, dims: Sequence[int]) -> Any:
        asked.append(dims)
        raise RequestError("CONTRACT_MISMATCH", "not that")

    monkeypatch.setattr(bench.slots, "reserve", reserve)
    for key in (1, 2):
        bench.arrive(key, 1)
    assert bench.start() is None
    assert bench.sink.failed == dict.fromkeys((1, 2), "CONTRACT_MISMATCH") and bench.executor.idle
    assert asked == [(2, 2)]


def test_an_output_is_reserved_as_the_contract_says_for_those_who_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, slots=1)
    bench.stages[1].contract = Contract(SPEC, TensorSpec("int64", ("rows", 2)))
    asked: list[Any] = []
    prepared: list[Batch] = []
    monkeypatch.setattr(bench.slots, "by_consumer", True)
    monkeypatch.setattr(bench.slots, "reserve", lambda *what: asked.append(what) or object())
    monkeypatch.setattr(bench.sink, "consumers_of", lambda batch: {12}, raising=False)
    monkeypatch.setattr(bench.sink, "prepare", lambda batch, producer: prepared.append(batch))
    monkeypatch.setattr(bench.sink, "replayable", lambda stage: False)
    receive(bench, Arrival([ticket(1, rows=3)]))
    batch = bench.expect(1)
    assert asked == [("int64", (3, 2), {12})]
    assert prepared == [batch] and not batch.replayable


def test_what_goes_on_here_has_its_rows_its_task_and_the_time_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, policy="window")
    came = [ticket(key, rows=rows, path=(1, 2)) for key, rows in ((1, 2), (2, 1))]
    came[1].task = 4
    receive(bench, Arrival(came))
    batch = bench.expect(1)
    bench.clock.now = 9
    bench.compute(batch)
    went_on = sorted(bench.scheduler._tickets.values(), key=lambda t: t.key)
    assert [(t.start, t.rows, t.task) for t in went_on] == [(0, 2, 0), (2, 1, 4)]
    assert {(t.arrival_ns, t.received_ns, t.ready_ns) for t in went_on} == {(0, 9, 9)}
