"""StageMeter: how busy a block is, also while its requests fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from scheduler_rig import ticket

from blockflow.core.errors import RequestError
from blockflow.core.launchspec import StageSpec
from blockflow.core.metrics import Histogram
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.worker.copies import InputCopies
from blockflow.worker.stage import StageMeter, StageSnapshot
from blockflow.worker.ticket import Batch

MS = 1_000_000
ROW = TensorSpec("float32", ("rows", "n"))
INFO = BlockInfo("b", "1", "0" * 64, "echo", Contract(ROW, ROW), 0, 0)


def failed(rows: int, begin: int, end: int) -> Any:
    """A batch of which every request failed."""
    return cast(
        Any,
        SimpleNamespace(
            tickets=(SimpleNamespace(key=1, rows=rows),),
            errors={1: "too bad"},
            rows=rows,
            shape=(2,),
            pad_to=(),
            compute_from_ns=begin,
            compute_to_ns=end,
            copies=0,
        ),
    )


@pytest.mark.parametrize("later_s", [0, 60])
def test_failed_rows_took_their_time_too(later_s: int) -> None:
    """A row of 5 ms: 200 of them a second is all that it can do, whatever becomes of them."""
    meter = StageMeter()
    for n in range(100):
        meter.account(failed(1, n * 10 * MS, (n * 10 + 5) * MS), (n * 10 + 5) * MS)
    _, mu, served = meter.snapshot(1000 * MS + later_s * 1000 * MS, 0, 0, 1).rates
    assert mu == pytest.approx(200)
    assert served == 0 and meter.rows == 0 and meter.failures == 100


def test_rows_are_counted_and_not_requests() -> None:
    """Four rows of 5 ms together, all of which fail: 800 a second."""
    meter = StageMeter()
    for n in range(100):
        meter.account(failed(4, n * 10 * MS, (n * 10 + 5) * MS), (n * 10 + 5) * MS)
    assert meter.snapshot(1000 * MS, 0, 0, 1).rates[1] == pytest.approx(800)


def test_what_was_computed_is_counted_and_its_time_parted() -> None:
    meter, good, bad = StageMeter(), ticket(1, rows=2), ticket(2)
    batch = Batch(1, (good, bad), errors={2: RequestError("CANCELLED", "")})
    batch.started_ns, batch.compute_from_ns, batch.compute_to_ns = 3 * MS, 4 * MS, 9 * MS
    meter.account(batch, 10 * MS)
    assert meter.counts == (1, 2, 1, 1, 0)  # requests, rows, batches, failures, expired
    assert (meter.failed_rows, meter.elements_in, meter.elements_padded) == (1, 3 * 4, 0)
    times = meter.wait, meter.overhead, meter.compute
    assert [(t.count, t.total) for t in times] == [(1, 3 * MS), (1, 2 * MS), (1, 5 * MS)]
    _, mu, served = meter.snapshot(10 * MS, 0, 0, 1).rates
    assert (mu, served) == (pytest.approx(600), pytest.approx(2 / 5, rel=0.06))  # in five seconds


def test_copies_are_counted_with_their_bytes() -> None:
    counted = InputCopies()
    for copies, nbytes in ((0, 100), (1, 8), (2, 4)):
        counted.add(copies, nbytes)
    assert (counted.copies, counted.nbytes) == (3, 16)


def test_what_only_pads_is_what_no_row_has() -> None:
    """Three rows of 4 and one of 6 columns, padded to 6."""
    meter = StageMeter()
    tickets = [SimpleNamespace(rows=3, shape=(4,)), SimpleNamespace(rows=1, shape=(6,))]
    batch = SimpleNamespace(rows=4, shape=(6,), pad_to=(6,), tickets=tickets)
    meter.given(cast(Any, batch))
    assert (meter.elements_in, meter.elements_padded) == (24, 6)


def once(value: int) -> Histogram:
    made = Histogram()
    made.record(value)
    return made


def test_each_figure_has_its_name() -> None:
    snapshot = StageSnapshot(
        queued=11,
        queued_rows=12,
        counts=(1, 2, 4, 8, 16),
        rates=(3.0, 6.0, 2.5),
        times=(once(5), once(6), once(7)),
        outs=(21, 22),
        elements=(31, 32),
        failed_rows=6,
    )
    kpi = snapshot.kpi(StageSpec(9, INFO, engine="echo", precision="fp32"))
    assert (kpi.stage, kpi.block, kpi.engine, kpi.precision) == (9, "b", "echo", "fp32")
    assert (kpi.queue, kpi.queue_rows) == (11, 12)
    assert (kpi.requests, kpi.rows, kpi.batches, kpi.failures, kpi.expired) == (1, 2, 4, 8, 16)
    assert (kpi.lam, kpi.mu, kpi.rho, kpi.rows_per_s) == (3.0, 6.0, 0.5, 2.5)
    assert kpi.failed_rows == 6 and kpi.mean_batch_rows == (2 + 6) / 4
    times = [once(n).summary() for n in (5, 6, 7)]
    assert [kpi.wait, kpi.overhead, kpi.compute] == times
    assert (kpi.bytes_out, kpi.copies_out) == (21, 22)
    assert (kpi.elements_in, kpi.elements_padded) == (31, 32)


def test_a_snapshot_is_of_its_moment() -> None:
    meter = StageMeter()
    meter.wait.record(5)
    before = meter.snapshot(0, 0, 0, 1).times[0]
    meter.wait.record(500)
    assert before.counts == once(5).counts and before.summary() == once(5).summary()


def test_a_stage_that_runs_in_two_lanes_serves_twice_as_much() -> None:
    meter = StageMeter()
    meter.account(failed(4, 0, 8 * MS), 8 * MS)
    one, two = (meter.snapshot(10 * MS, 0, 0, width).rates for width in (1, 2))
    assert two[1] == 2 * one[1] > 0 and two[::2] == one[::2]
