"""The rows of several tickets as one tensor: whose they are, and when they are copied for it."""

from __future__ import annotations

import pytest
import torch
from scheduler_rig import ticket

from blockflow.worker.buffer_pool import BufferPool
from blockflow.worker.gathering import gathered
from blockflow.worker.ticket import FILL, Source, Ticket

POOL = BufferPool()


def source(first: int, rows: int = 4, width: int = 2) -> Source:
    """Row n has the value ``first`` + n in all its columns."""
    x = torch.arange(first, first + rows, dtype=torch.float32).repeat_interleave(width)
    return Source("float32", (width,), 1, tensor=x.view(rows, width))


def of(whose: Source, start: int, rows: int = 1, cut: tuple[int, ...] | None = None) -> Ticket:
    made = ticket(0, rows=rows)
    made.source, made.start, made.cut = whose, start, cut
    return made


@pytest.mark.parametrize(
    ("asked", "rows", "copies"),
    [
        ([("a", 0, 4)], [0, 1, 2, 3], 0),
        ([("a", 1, 1), ("a", 2, 2)], [1, 2, 3], 0),  # side by side: a view
        ([("a", 0, 1), ("a", 2, 1)], [0, 2], 1),
        ([("a", 1, 1), ("a", 0, 1)], [1, 0], 1),
        ([("a", 0, 1), ("b", 1, 1)], [0, 11], 1),  # the next row, but of another tensor
        ([("a", 0, 1), ("b", 1, 1), ("a", 1, 3)], [0, 11, 1, 2, 3], 1),
        ([("a", 3, 1), ("b", 0, 4)], [3, 10, 11, 12, 13], 1),
    ],
)
def test_each_ticket_has_its_own_rows(
    asked: list[tuple[str, int, int]], rows: list[int], copies: int
) -> None:
    sources = {"a": source(0), "b": source(10)}
    tickets = [of(sources[name], start, count) for name, start, count in asked]
    x, copied = gathered(tickets, (), 0.0, POOL)
    assert x.tolist() == [[float(n)] * 2 for n in rows]
    assert copied == copies and x.is_contiguous()


def test_a_padded_batch_that_stays_together_is_not_cut() -> None:
    whole = source(0, rows=3, width=4)
    cuts: list[tuple[int, ...]] = [(2,), (2,), (3,)]
    tickets = [of(whole, n, cut=cut) for n, cut in enumerate(cuts)]
    x, copied = gathered(tickets, (4,), FILL, POOL)
    assert copied == 0 and x.data_ptr() == whole.tensor().data_ptr()
    x, copied = gathered(tickets, (5,), FILL, POOL)  # another length: what was padding is cut off
    assert copied == 1
    assert x.tolist() == [[0.0] * 5, [1.0, 1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 0.0, 0.0]]
    x, _ = gathered(tickets[:2], (4,), 9.0, POOL)  # another value than lies there
    assert x.tolist() == [[0.0, 0.0, 9.0, 9.0], [1.0, 1.0, 9.0, 9.0]]
