"""What a slicing is estimated to cost, beside a plain account of the same rows' time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.tuning.slicing import slice_evenly
from blockflow.tuning.stages import BOUNDARY_NS, best_stages, estimate

MS = 1e6


def plainly(
    table: Sequence[Sequence[float]],
    bounds: Sequence[int],
    ahead: int,
    new: int,
    joins: bool,
    splits: bool,
) -> float:
    """The time of ``new`` rows from when they come, that of those ahead as far as they delay them,
    over the same with one stage that costs no decision."""

    def time(begin: int, end: int, rows: int) -> float:
        return sum(block[rows] for block in table[begin:end])

    last, both = len(table), ahead + new
    whole = time(0, last, ahead)
    spent = both * (len(bounds) - 1) * BOUNDARY_NS
    for begin, end in pairwise(bounds):
        under_way, left = time(begin, end, ahead), time(end, last, ahead)
        ways = [new * (left + time(0, last, new))]  # they wait for the end of the batch
        if joins and end < last:
            finish = time(0, end, new) + time(end, last, both)
            ways.append(new * finish + ahead * (finish - left))
        spent += under_way / whole * (new * under_way / 2 + min(ways))
    saved = [0.0]
    first, second = both // 2, both - both // 2
    for cut in bounds[1:-1] if splits else ():
        halves = time(cut, last, first), time(cut, last, second)
        if time(cut, last, both) >= sum(halves):
            apart = first * halves[0] + second * sum(halves)
            saved.append(both * time(cut, last, both) - apart)
    return (spent - max(saved)) / (new * (whole / 2 + time(0, last, new)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 3)), min_size=1),
    st.integers(1, 4),
    st.integers(2, 9),
    st.booleans(),
    st.booleans(),
)
def test_the_estimate_is_that_of_a_plain_account(
    blocks: list[tuple[int, int, int]], stages: int, rows: int, joins: bool, splits: bool
) -> None:
    table = [
        [0.0, *((1 + a + b * n + c * n * n) * MS for n in range(1, rows + 1))] for a, b, c in blocks
    ]
    sliced = slice_evenly([block[1] for block in table], min(stages, len(blocks)))
    loads = list(product(sorted({1, rows // 2}), repeat=2))
    plain = [plainly(table, sliced.bounds, *load, joins, splits) for load in loads]
    found = estimate(table, sliced, rows, joins=joins, splits=splits)
    assert found == pytest.approx(sum(plain) / len(plain))


def test_two_rows_may_join() -> None:
    """A tenth of the way through, the second of them saves most of its wait."""
    table = [[0.0, time * MS, time * MS] for time in (1, 9)]
    assert best_stages(table, 2, joins=True, splits=False) == (1, 1)
    # 1 of 10 ms: 0.5 until the boundary, 10 and a delay of 1; else 4.5 until the end, and 10.
    told = estimate(table, slice_evenly([1, 9], 2), 2, joins=True, splits=False)
    assert told == pytest.approx((0.1 * 11.5 + 0.9 * 14.5 + 4 * BOUNDARY_NS / MS) / 15)
