"""Clients that were lost: what of their messages still counts."""

from __future__ import annotations

from blockflow.dispatcher import past
from blockflow.dispatcher.past import Past, came_after


def name(count: int) -> bytes:
    return b"\0" + (count % (1 << 32)).to_bytes(4)


def test_the_later_name_has_the_connection() -> None:
    assert came_after(name(8), name(7)) and not came_after(name(7), name(8))
    assert came_after(name(1 << 32), name((1 << 32) - 1))  # the counter wraps
    high = 1 << 24
    assert came_after(name(high), name(high - 1)) and came_after(name(high + 8), name(high + 7))
    assert came_after(name(7 + (1 << 31) - 1), name(7))
    assert not came_after(name(7 + (1 << 31)), name(7))
    assert came_after(name(7), b"alice") and not came_after(b"alice", name(7))
    assert not came_after(b"alice", b"bob")


def test_who_is_over_stays_so_and_who_named_itself_may_be_back() -> None:
    book = Past()
    for client in (name(7), b"alice", b"", b"\0" * 6, b"\0ab"):
        book.add(client)
    assert len(book._clients) == 1
    assert name(7) in book
    assert b"alice" not in book, "nothing follows from it, and its name may be as long as a frame"


def test_it_is_bounded() -> None:
    book = Past()
    for count in range(past.REMEMBERED + 1):
        book.add(name(count))
    assert name(0) not in book and name(1) in book and name(past.REMEMBERED) in book
    book.add(name(1))  # again: the latest now
    book.add(name(past.REMEMBERED + 1))
    assert name(1) in book and name(2) not in book
