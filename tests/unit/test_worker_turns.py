"""Who of a worker's threads receives, computes and sends, one step of one thread after another."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
from lanes_rig import LATE, MS

from blockflow.tensormq.agent import Mailbox
from blockflow.wire import control
from blockflow.worker.parts import Wake
from blockflow.worker.turns import WatchedSockets
from tests.turns_rig import Rig, serving


def one_by_one(rig: Rig, *paths: tuple[int, ...]) -> None:
    """Requests along these paths; whoever can goes on after each."""
    for path in paths:
        rig.send(*path)
        rig.settle()


def at(rig: Rig) -> list[str]:
    return [t.at for t in (rig.engine, rig.data, *rig.lanes)]


def test_the_engine_thread_receives_computes_and_sends_and_wakes_nobody() -> None:
    with serving(lanes=1) as rig:
        rig.send(1)
        assert rig.awake(rig.engine) and not rig.awake(rig.data)
        rig.go(rig.engine)
        assert at(rig) == ["computes", "asleep"] and not rig.awake(rig.data)
        rig.go(rig.engine)
        assert at(rig) == ["asleep", "asleep"] and not rig.awake(rig.data)
        assert rig.answered() == [1]


def test_what_follows_on_a_device_is_looked_after_when_the_message_has_left() -> None:
    with serving(lanes=1) as rig:
        left: list[list[list[int]]] = []
        rig.runner.sent = lambda: left.append(list(rig.sink.sent))
        rig.send(1)
        for _ in range(2):
            rig.go(rig.engine)
        assert left == [[[1]]]


def test_the_data_thread_reads_while_the_engine_thread_computes_and_then_no_more() -> None:
    with serving(lanes=1) as rig:
        rig.send(1)
        rig.settle()
        rig.send(2)
        assert rig.awake(rig.data)
        rig.go(rig.data)
        assert not rig.line.frames and len(rig.scheduler) == 1
        for _ in (1, 2):
            rig.go(rig.engine)
        rig.send(3)
        assert rig.awake(rig.engine) and not rig.awake(rig.data)


def test_a_further_frame_spoils_its_own_message_only() -> None:
    with serving(lanes=1) as rig:
        rig.send(1)
        rig.line.frames[-1].more = True
        rig.line.send(b"its tensor", b"what nobody sends", b"and more of it")
        rig.line.frames[-4].more = True
        rig.send(2)
        rig.settle()
        assert rig.frame_of == {0: b"", 1: None}


def test_who_gets_a_lane_late_reads_on_when_it_takes_what_has_filled_the_inbox() -> None:
    with serving(lanes=1, inbox=1) as rig:
        for stage in (1, 2, 3):
            rig.send(stage)
        rig.settle()
        assert at(rig) == ["computes", "asleep"] and rig.executor.full
        rig.executor.lanes = 3  # as the engine thread does it after a batch
        rig.mail.put(Wake())
        rig.settle()
        assert at(rig) == ["computes", "asleep", "computes", "computes"] and not rig.line.frames
        rig.send(1)
        assert rig.awake(rig.data), "and listens on"


def test_who_gets_a_lane_late_tells_what_is_due_now_that_there_is_one() -> None:
    with serving(lanes=1) as rig:
        rig.scheduler.set_policy(2, {"policy": "window", "max_delay_ms": 3}, 0)
        rig.send(1)
        rig.send(2)
        rig.settle()
        rig.executor.lanes = 2
        rig.mail.put(Wake())
        rig.settle()
        assert at(rig) == ["computes", "asleep", "rests"]
        rig.clock.now = 3 * MS
        rig.settle()
        assert at(rig) == ["computes", "asleep", "computes"]


def test_who_expires_beside_what_is_computed_makes_room_for_what_the_engine_thread_left() -> None:
    with serving(lanes=3, inbox=1) as rig:
        for path, deadline in (((2,), LATE), ((1, 2), 5 * MS), ((3, 2), LATE)):
            rig.send(*path, deadline=deadline)
            rig.settle()
        one, other = rig.lanes
        for thread in (rig.engine, other):
            rig.go(thread)
        rig.settle()
        assert at(rig) == ["asleep", "asleep", "computes", "computes"]
        rig.send(1)
        rig.send(2)  # stays in the socket: the one before waits, and there is room for one
        rig.settle()
        rig.go(one)  # takes that; what it has computed waits in its place
        rig.settle()
        assert rig.line.frames
        rig.clock.now = 5 * MS
        rig.settle()
        assert rig.sink.failed == {2: "DEADLINE_EXCEEDED"} and not rig.line.frames


def test_a_lane_that_makes_room_wakes_who_has_read_nothing_for_want_of_it() -> None:
    with serving(lanes=3, inbox=2) as rig:
        one_by_one(rig, (2,), (3, 1), (1,), (2,))
        one, other = rig.lanes
        rig.go(one)  # what it has computed waits for what the other one computes
        rig.settle()
        rig.send(2)
        rig.settle()
        assert rig.line.frames and rig.executor.full
        rig.go(other)
        rig.settle()
        assert at(rig) == ["computes", "asleep", "rests", "computes"] and not rig.line.frames


def test_the_data_thread_starts_what_is_due_and_wakes_who_had_no_room_to_listen() -> None:
    with serving(lanes=3, inbox=1) as rig:
        rig.scheduler.set_policy(2, {"policy": "window", "max_delay_ms": 5}, 0)
        one_by_one(rig, (3,), (1, 2))
        rig.go(rig.engine)
        one_by_one(rig, (1,), (3,))
        rig.go(rig.lanes[0])  # takes the next one; what it has computed waits in the window
        rig.settle()
        assert at(rig) == ["asleep", "asleep", "computes", "rests"] and rig.line.frames
        rig.clock.now = 5 * MS
        rig.settle()
        assert at(rig) == ["computes", "asleep", "computes", "computes"] and not rig.line.frames


def test_what_a_lane_makes_ready_and_does_not_take_itself_goes_to_one_that_rests() -> None:
    with serving(lanes=3) as rig:
        one_by_one(rig, (3,), (1, 2), (1,))
        assert at(rig) == ["computes", "asleep", "computes", "rests"]
        rig.go(rig.lanes[0])
        rig.settle()
        assert at(rig) == ["computes", "asleep", "computes", "computes"]


def test_all_that_is_due_at_once_starts_in_as_many_lanes() -> None:
    with serving(lanes=3) as rig:
        for stage in (2, 3):
            rig.scheduler.set_policy(stage, {"policy": "window", "max_delay_ms": 5}, 0)
        one_by_one(rig, (1,), (2,), (3,))
        rig.clock.now = 5 * MS
        rig.settle()
        assert at(rig) == ["computes", "asleep", "computes", "computes"]


def test_what_comes_at_the_end_of_a_forward_is_started_by_who_reads_it() -> None:
    with serving(lanes=1) as rig:
        rig.send(1)
        rig.settle()
        rig.send(2)
        rig.go(rig.engine)
        assert at(rig) == ["computes", "asleep"] and len(rig.scheduler) == 0


def test_the_data_thread_reads_nothing_while_the_engine_thread_listens() -> None:
    with serving(lanes=1) as rig:
        rig.send(1)
        rig.mail.put(Wake())
        rig.go(rig.data)
        assert rig.line.frames and rig.awake(rig.engine)


def test_a_landing_without_a_slot_for_the_next_batch_is_tried_again_soon() -> None:
    with serving(lanes=1, lands=True, slots=1) as rig:
        rig.send(1, 2)
        rig.settle()
        rig.go(rig.engine)
        rig.settle()
        rig.land(rig.landing[0])  # what goes on here holds the only slot
        rig.settle()
        rig.clock.now += MS
        rig.settle()
        assert at(rig) == ["computes", "asleep"]


def test_who_rests_is_given_one_batch() -> None:
    """Though there may be more lanes than threads, which are still to begin."""
    with serving(lanes=2) as rig:
        for stage in (2, 3):
            rig.scheduler.set_policy(stage, {"policy": "window", "max_delay_ms": 5}, 0)
        for path in ((2,), (1,)):
            one_by_one(rig, path)
            rig.clock.now += 5 * MS
            rig.settle()
        rig.go(rig.engine)
        for stage in (2, 3):
            rig.send(stage)
        rig.settle()
        assert at(rig) == ["asleep", "asleep", "computes"]
        rig.executor.lanes = 4
        rig.clock.now += 5 * MS
        rig.go(rig.data)
        rig.settle()
        assert at(rig) == ["computes", "asleep", "computes", "computes", "rests"]


def test_in_a_pause_nobody_wakes_for_what_would_be_due() -> None:
    with serving(lanes=2) as rig:
        rig.scheduler.set_policy(2, {"policy": "window", "max_delay_ms": 5}, 0)
        one_by_one(rig, (1,), (2,))
        rig.tell(control.Stop())
        rig.settle()
        rig.clock.now = 6 * MS
        rig.settle()
        assert at(rig) == ["computes", "asleep", "rests"]
        rig.go(rig.engine)
        rig.settle()
        assert rig.data.at == "ended" and rig.answered() == [1]


def test_a_forward_with_a_long_time_out_does_not_wake_the_data_thread() -> None:
    with serving(lanes=1, timeout_ms=(2000, 0, 0)) as rig:
        for _ in range(2):
            rig.send(1)
            rig.go(rig.engine)
            assert at(rig) == ["computes", "asleep"] and not rig.awake(rig.data)
            rig.go(rig.engine)


def test_the_data_thread_reads_while_the_engine_thread_is_at_a_job() -> None:
    """Each of them may take seconds, and what comes late is answered for in time."""
    with serving(lanes=1, burst=1) as rig:
        rig.send(1)
        rig.settle()
        rig.job()
        for deadline in (LATE, 5 * MS):  # one is read, and there is more to read
            rig.send(1, deadline=deadline)
        rig.long_jobs = True
        rig.go(rig.engine)
        rig.settle()
        assert at(rig) == ["job", "asleep"] and not rig.line.frames
        rig.clock.now = 5 * MS
        rig.settle()
        assert at(rig) == ["job", "asleep"] and rig.sink.failed == {3: "DEADLINE_EXCEEDED"}


def test_lanes_that_rest_go_on_while_the_engine_thread_is_at_a_job() -> None:
    with serving(lanes=4) as rig:
        rig.scheduler.set_policy(3, {"policy": "window", "max_delay_ms": 3}, 0)
        rig.long_jobs = True
        rig.send(1, 2)
        rig.settle()
        rig.job()
        rig.go(rig.engine)
        rig.settle()
        assert at(rig) == ["job", "asleep", "computes", "rests", "rests"]
        for stage in (1, 3):
            rig.send(stage)
        rig.settle()
        assert at(rig) == ["job", "asleep", "computes", "computes", "rests"]
        rig.clock.now = 3 * MS
        rig.settle()
        assert at(rig) == ["job", "asleep", "computes", "computes", "computes"]


def test_what_is_due_while_nobody_could_start_it_does_not_keep_the_data_thread_awake() -> None:
    """One is at a job, which may be long, the other at a batch; who is done first starts it."""
    with serving(lanes=2) as rig:
        rig.scheduler.set_policy(2, {"policy": "window", "max_delay_ms": 3}, 0)
        one_by_one(rig, (1,), (3,))
        rig.go(rig.engine)
        rig.send(2)
        rig.settle()
        rig.tell(control.Undrain())  # a message, and a job with it
        rig.job()
        rig.clock.now = 3 * MS
        rig.go(rig.engine)
        rig.go(rig.data)
        assert at(rig) == ["job", "asleep", "computes"] and not rig.awake(rig.data)
        rig.go(rig.lanes[0])
        assert at(rig) == ["job", "asleep", "computes"] and len(rig.scheduler) == 0


def test_what_was_given_before_a_pause_is_computed_and_nothing_is_read_meanwhile() -> None:
    """Nor does each message wake the data thread, which would find it again and again."""
    with serving(lanes=1, lands=True) as rig:
        rig.send(1, 2)
        rig.settle()
        rig.go(rig.engine)
        rig.settle()
        rig.land(rig.landing[0])
        rig.tell(control.Stop())
        rig.go(rig.data)
        rig.go(rig.engine)
        assert at(rig) == ["computes", "asleep"]
        rig.send(1)
        rig.settle()
        assert rig.line.frames


def test_what_was_given_goes_before_a_job_and_every_job_is_done() -> None:
    with serving(lanes=1, lands=True) as rig:
        rig.send(1, 2)
        rig.settle()
        rig.go(rig.engine)
        rig.settle()
        rig.land(rig.landing[0])
        for name in "ab":
            rig.job(name)
        rig.go(rig.engine)
        assert at(rig) == ["computes", "asleep"]
        rig.go(rig.engine)
        rig.settle()
        assert rig.jobs == ["a", "b"]


def test_it_says_that_it_has_drained_when_the_last_that_waited_has_expired() -> None:
    with serving(lanes=1) as rig:
        rig.scheduler.set_policy(1, {"policy": "window", "max_delay_ms": 9}, 0)
        rig.send(1, deadline=5 * MS)
        rig.tell(control.Drain())
        rig.settle()
        assert rig.told == []
        rig.clock.now = 5 * MS
        rig.settle()
        assert rig.told == [control.Drained(7, 3)]


def test_at_the_end_who_rests_is_woken_and_who_computes_starts_nothing_more() -> None:
    with serving(lanes=4) as rig:
        one_by_one(rig, (1,), (2,))
        rig.go(rig.engine)
        rig.send(2)
        rig.settle()
        with rig.turns.lock:
            rig.turns.close()
        rig.settle()
        assert at(rig) == ["ended", "asleep", "computes", "ended", "ended"]
        rig.go(rig.lanes[0])
        assert at(rig) == ["ended", "asleep", "ended", "ended", "ended"]
        assert rig.answered() == [1, 2]


def test_what_lands_after_the_end_wakes_nobody() -> None:
    """The bell may be closed by then."""
    with serving(lanes=1, lands=True) as rig:
        rig.send(1)
        rig.settle()
        rig.go(rig.engine)
        rig.tell(control.Stop())
        rig.settle()
        with rig.turns.lock:
            rig.turns.close()
        rig.settle()
        assert at(rig) == ["ended", "asleep"]
        cast(Any, rig.turns).poke = pytest.fail
        rig.land(rig.landing[0])
        assert rig.answered() == []


def test_a_mailbox_emptied_before_its_bell_rings_wakes_its_owner_once() -> None:
    """Else who sleeps there spins until the next message: it finds a bell, and nothing to read."""
    watched, mailbox = WatchedSockets(), Mailbox[int]()
    watched.hear(mailbox.fileno())
    mailbox._items.append(1)  # what put() does, its owner looks, and then the bell rings
    assert mailbox.drain() == [1]
    os.eventfd_write(mailbox.fileno(), 1)
    assert len(watched.epoll.poll(30.0)) == 1 and not mailbox
    assert watched.epoll.poll(0) == []
    mailbox.put(2)
    assert len(watched.epoll.poll(30.0)) == 1
    assert mailbox.drain() == [2]
    mailbox.close()
    watched.epoll.close()
