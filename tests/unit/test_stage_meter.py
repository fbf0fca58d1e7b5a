"""StageMeter: how busy a block is, also while its requests fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockflow.worker.stage import StageMeter

MS = 1_000_000


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
        ),
    )


@pytest.mark.parametrize("later_s", [0, 60])
def test_failed_rows_took_their_time_too(later_s: int) -> None:
    """A row of 5 ms: 200 of them a second is all that it can do, whatever becomes of them."""
    meter = StageMeter()
    for n in range(100):
        meter.account(failed(1, n * 10 * MS, (n * 10 + 5) * MS), (n * 10 + 5) * MS)
    _, mu, served = meter.snapshot(1000 * MS + later_s * 1000 * MS, 0, 0).rates
    assert mu == pytest.approx(200)
    assert served == 0 and meter.rows == 0 and meter.failures == 100


def test_rows_are_counted_and_not_requests() -> None:
    """Four rows of 5 ms together, all of which fail: 800 a second."""
    meter = StageMeter()
    for n in range(100):
        meter.account(failed(4, n * 10 * MS, (n * 10 + 5) * MS), (n * 10 + 5) * MS)
    assert meter.snapshot(1000 * MS, 0, 0).rates[1] == pytest.approx(800)


def test_what_only_pads_is_what_no_row_has() -> None:
    """Three rows of 4 and one of 6 columns, padded to 6."""
    meter = StageMeter()
    tickets = [SimpleNamespace(rows=3, shape=(4,)), SimpleNamespace(rows=1, shape=(6,))]
    batch = SimpleNamespace(rows=4, shape=(6,), pad_to=(6,), tickets=tickets)
    meter.given(cast(Any, batch))
    assert (meter.elements_in, meter.elements_padded) == (24, 6)
