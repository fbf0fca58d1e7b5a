"""Who is too slow to be sent to: by bytes, by time, and who only has much on the way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest

from blockflow.dispatcher.debt import (
    CROWDED_NS,
    SLOW_CLIENT_BYTES,
    SLOW_CLIENT_NS,
    SLOWEST_NS_PER_BYTE,
    Debt,
)

MIB = 2**20
STEP_NS = 100_000_000


@dataclass
class Frame:
    """Of which ZeroMQ says whether it is written."""

    done: bool = False


def owing(frames: int, nbytes: int) -> Debt:
    debt = Debt(0)
    debt.posted.extend((Frame(), nbytes) for _ in range(frames))
    debt.posted_bytes = frames * nbytes
    return debt


def cut_off_ns(debt: Debt, rate: float | None, until_ns: int = 10 * SLOW_CLIENT_NS) -> int | None:
    """When a client that takes ``rate`` bytes a second (None: nobody counts) is given up."""
    for now in range(0, until_ns, STEP_NS):
        taken = None if rate is None else int(rate * now / 1e9)
        if debt.hopeless(now, taken):
            return now
    return None


def test_one_that_takes_nothing_is_given_up_in_half_a_second() -> None:
    assert cut_off_ns(owing(3, 4 * MIB), 0.0) == CROWDED_NS + STEP_NS


def test_one_that_reads_may_have_much_on_the_way() -> None:
    """A burst of ten results of 4 MiB over 20 MB/s: every frame within its own time."""
    debt = owing(10, 4 * MIB)
    for now in range(0, 3 * SLOW_CLIENT_NS, STEP_NS):
        taken = int(20e6 * now / 1e9)
        for tracker, _ in list(debt.posted)[: taken // (4 * MIB) - (10 - len(debt.posted))]:
            tracker.done = True  # type: ignore[misc]
        if debt.settle(now):
            return
        assert not debt.hopeless(now, taken)
    raise AssertionError("it was never through")


def test_one_that_drips_is_given_up_when_a_frame_takes_too_long() -> None:
    frame = 4 * MIB
    assert cut_off_ns(owing(3, frame), 100.0) == pytest.approx(
        SLOW_CLIENT_NS + SLOWEST_NS_PER_BYTE * frame, abs=STEP_NS
    )


def test_up_to_the_bound_only_time_counts() -> None:
    frame = SLOW_CLIENT_BYTES // 2
    late = SLOW_CLIENT_NS + SLOWEST_NS_PER_BYTE * frame
    assert cut_off_ns(owing(2, frame), 0.0) == pytest.approx(late, abs=STEP_NS)
    alone = SLOW_CLIENT_NS + SLOWEST_NS_PER_BYTE * 64 * MIB
    assert cut_off_ns(owing(1, 64 * MIB), 0.0, 2 * alone) == pytest.approx(alone, abs=STEP_NS)


def test_where_nobody_counts_a_frame_has_its_time() -> None:
    frame = 4 * MIB
    allowed = CROWDED_NS + SLOWEST_NS_PER_BYTE * frame
    assert cut_off_ns(owing(3, frame), None) == pytest.approx(allowed, abs=STEP_NS)


def test_what_was_seen_in_an_earlier_crowd_does_not_count() -> None:
    """Not crowded for a while, and then with the same count: its half second begins anew."""
    debt = owing(3, 4 * MIB)
    assert not debt.hopeless(0, 7)
    frame, _ = debt.posted[0]
    frame.done = True  # type: ignore[misc]
    debt.settle(2 * CROWDED_NS)
    assert not debt.hopeless(2 * CROWDED_NS, None)
    debt.posted.append((Frame(), 4 * MIB))
    debt.posted_bytes += 4 * MIB
    begun, end = 2 * CROWDED_NS + STEP_NS, 3 * CROWDED_NS + STEP_NS
    assert not any(debt.hopeless(now, 7) for now in range(begun, end + 1, STEP_NS))
    assert debt.hopeless(end + STEP_NS, 7)


@pytest.mark.parametrize("frames", [1, 3], ids=["slow", "crowded"])
def test_while_nobody_looks_nobody_is_slow(frames: int) -> None:
    """A Dispatcher that stood still goes on with what was left of each client's time."""
    due = cut_off_ns(owing(frames, 4 * MIB), 0.0)
    assert due is not None
    debt, stop, still = owing(frames, 4 * MIB), due // 2, 10 * SLOW_CLIENT_NS
    looks = [*range(0, stop, STEP_NS), *range(still + stop, still + due, STEP_NS)]
    assert not any(debt.hopeless(now, 0) for now in looks)
    assert debt.hopeless(still + due + STEP_NS, 0)


def test_where_nobody_counts_each_frame_begins_the_time_anew() -> None:
    debt, frame = owing(10, 4 * MIB), CROWDED_NS + SLOWEST_NS_PER_BYTE * 4 * MIB
    gone = frame - frame % STEP_NS - 2 * STEP_NS
    for now in range(0, 5 * gone, STEP_NS):
        if now and now % gone == 0:
            debt.posted[0][0].done = True  # type: ignore[misc]
            assert not debt.settle(now)
        assert not debt.hopeless(now, None)


def test_the_time_that_a_look_was_late_is_not_the_last_bytes_either() -> None:
    debt = owing(3, 4 * MIB)
    looks = [(0, 0), (2, 0), (4, 5), (105, 5), (107, 5), (109, 5)]  # bytes came at 4
    assert not any(debt.hopeless(at * STEP_NS, taken) for at, taken in looks)
    assert debt.hopeless(111 * STEP_NS, 5)


def test_all_that_is_written_is_taken_off_and_what_waits_is_owed() -> None:
    debt = owing(2, MIB)
    debt.waiting.append([b"x"])
    for tracker, _ in debt.posted:
        tracker.done = True  # type: ignore[misc]
    assert not debt.settle(0)
    assert debt.posted_bytes == 0
    debt.waiting.clear()
    assert debt.settle(0)


def test_where_all_owe_too_much_it_is_known_who_stands() -> None:
    debt = owing(2, MIB)  # by itself it may owe so much
    for now in range(0, CROWDED_NS + 1, STEP_NS):
        assert not debt.hopeless(now, 0, pressed=True) and not debt.stands
    assert not debt.hopeless(CROWDED_NS + STEP_NS, 0, pressed=True) and debt.stands
    assert not debt.hopeless(CROWDED_NS + 2 * STEP_NS, 0) and not debt.stands


def test_while_zeromq_encrypts_for_others_nobody_stands() -> None:
    busy = 2 * CROWDED_NS
    debt = owing(3, 4 * MIB)
    looks = range(0, CROWDED_NS + busy + 1, STEP_NS)
    assert not any(debt.hopeless(now, 0, pressed=True, busy_ns=busy) for now in looks)
    assert debt.hopeless(looks[-1] + STEP_NS, 0, pressed=True, busy_ns=busy)


def test_two_messages_are_a_crowd() -> None:
    assert cut_off_ns(owing(2, 8 * MIB), 0.0) == CROWDED_NS + STEP_NS


@pytest.mark.parametrize("busy_ns", [0, CROWDED_NS])
def test_what_its_connection_does_not_take_at_all_has_its_time(busy_ns: int) -> None:
    debt = Debt(0, nbytes=4, waiting=deque([[b"x"]]))
    late = SLOW_CLIENT_NS + busy_ns
    assert not any(debt.hopeless(now, 0, busy_ns=busy_ns) for now in range(0, late + 1, STEP_NS))
    assert debt.hopeless(late + STEP_NS, 0, busy_ns=busy_ns)
