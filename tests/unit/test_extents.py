"""Extents: what is free of an arena's bytes, and which of it is taken."""

from __future__ import annotations

import pytest

from blockflow.tensormq.extents import Extents

KIB = 1024


def test_small_extents_share_a_page_and_large_ones_start_on_one() -> None:
    e = Extents(64 * KIB)
    sizes = [1, 64, 65, 5000, 10, 4096]
    starts = [e.take(e.size_of(n)) for n in sizes]
    assert starts == [0, 64, 128, 4096, 256, 12288]
    assert [e.size_of(n) for n in (0, 1, 64, 65, 4095, 4096, 4097)] == [
        64,
        64,
        64,
        128,
        4096,
        4096,
        8192,
    ]


def test_the_lowest_gap_that_fits_is_taken() -> None:
    e = Extents(64 * KIB)
    starts = [e.take(4096) for _ in range(4)]
    e.give(starts[2], 4096)  # type: ignore[arg-type]
    e.give(starts[0], 4096)  # type: ignore[arg-type]
    assert e.take(8192) == 4 * 4096
    assert e.take(4096) == 0
    assert e.take(4096) == 8192


def test_the_end_is_that_of_the_highest_in_use() -> None:
    e = Extents(16 * KIB)
    assert e.end == 0
    starts = [e.take(4096) for _ in range(4)]
    assert e.end == 16 * KIB and e.gaps() == []
    for start, end in ((4096, 16), (12288, 12), (8192, 4), (0, 0)):
        assert start in starts
        e.give(start, 4096)
        assert e.end == end * KIB
    assert e.gaps() == [(0, 16 * KIB)]


def test_bytes_given_back_twice_are_a_defect() -> None:
    e = Extents(64 * KIB)
    e.take(4096)
    e.give(0, 4096)
    for start, size in [(0, 64), (4096, 64), (60 * KIB, 4096)]:
        with pytest.raises(ValueError, match="free already"):
            e.give(start, size)
    with pytest.raises(ValueError):
        Extents(100)
    with pytest.raises(ValueError):
        Extents(4096, align=100)
