"""The data thread: how a worker drains and stops, and what it does about a forward that hangs."""

from __future__ import annotations

from lanes_rig import MS

from blockflow.batching.facts import StageFacts
from blockflow.wire import control
from blockflow.worker.parts import Wake
from blockflow.worker.worker import EXIT_OK, EXIT_STUCK
from tests.turns_rig import serving

S = 1000 * MS


def test_it_stops_when_what_runs_is_done_and_leaves_the_rest() -> None:
    with serving(lanes=1) as rig:
        for _ in range(2):
            rig.send(1)
            rig.settle()
        rig.tell(control.Stop())
        rig.settle()
        assert rig.data.at == "asleep"
        rig.go(rig.engine)
        rig.settle()
        assert rig.data.result == EXIT_OK and rig.answered() == [1]


def test_it_is_as_patient_as_it_was_when_it_was_told_to_stop() -> None:
    with serving(lanes=1) as rig:
        rig.send(1)
        rig.settle()
        rig.tell(control.Stop())
        rig.settle()
        assert rig.data.until_ns == 30 * S
        rig.clock.now = 29 * S
        rig.mail.put(Wake())
        rig.settle()
        assert rig.data.at == "asleep" and rig.data.until_ns == 30 * S
        rig.clock.now = 30 * S + 1
        rig.settle()
        assert rig.data.result == EXIT_STUCK


def test_a_forward_that_hangs_ends_it_when_the_other_lane_is_done() -> None:
    with serving(lanes=2, timeout_ms=(20, 0, 0)) as rig:
        for stage in (1, 2):
            rig.send(stage)
            rig.settle()
        rig.clock.now = 20 * MS
        rig.settle()
        assert rig.sink.failed == {1: "BLOCK_FAILED"}
        assert rig.data.at == "asleep" and rig.data.until_ns == 2 * S + 20 * MS
        rig.go(rig.lanes[0])
        rig.settle()
        assert rig.data.result == EXIT_STUCK and rig.sink.sent == [[2]]


def test_it_has_drained_once_when_all_has_left_and_sends_what_waits_for_its_connection() -> None:
    with serving(lanes=1) as rig:
        rig.unsent, before = 1, rig.flushed
        rig.tell(control.Drain())
        rig.settle()
        assert rig.told == [] and rig.flushed > before
        rig.unsent = 0
        for _ in range(2):
            rig.mail.put(Wake())
            rig.settle()
        assert rig.told == [control.Drained(7, 3)]


def test_who_is_no_longer_to_drain_does_not_say_that_it_has() -> None:
    with serving(lanes=1) as rig:
        rig.send(1)
        rig.settle()
        for message in (control.Drain(), control.Undrain()):
            rig.tell(message)
            rig.settle()
        rig.go(rig.engine)
        rig.settle()
        assert rig.told == [] and rig.executor.idle


def test_fewer_lanes_count_at_once_and_more_when_their_threads_are_set() -> None:
    with serving(lanes=2) as rig:
        rig.send(1)
        rig.settle()
        rig.tell(control.SetThreads(1, 9))
        rig.settle()
        assert rig.executor.lanes == 2
        rig.go(rig.engine)
        rig.settle()
        assert rig.executor.lanes == len(rig.stages) == len(rig.lanes) + 1
        rig.send(1)
        rig.settle()
        rig.tell(control.SetThreads(2, 1))
        rig.settle()
        assert rig.executor.lanes == 1
        rig.go(rig.engine)
        rig.tell(control.SetThreads(2, 3))
        rig.settle()
        assert rig.executor.lanes == 1, "two threads each could not be had"


def test_an_order_that_comes_amid_another_ones_work_has_its_lanes_before_its_threads() -> None:
    """To open an engine anew takes seconds; else three lanes would have two threads each."""
    with serving(lanes=1) as rig:
        opened: list[tuple[int, int]] = []

        def opens(threads: int) -> None:
            opened.append((threads, rig.executor.lanes))
            rig.me.stand("job")
            rig.runner.threads = threads

        rig.runner.set_threads, rig.long_jobs = opens, True
        for order in (control.SetThreads(1, 3), control.SetThreads(2, 1)):
            rig.tell(order)
            rig.settle()
        rig.go(rig.engine)
        assert opened == [(1, 1), (2, 1)]
        rig.go(rig.engine)
        rig.settle()
        assert rig.executor.lanes == 1 and rig.runner.threads == 2


def test_engines_that_cannot_compute_beside_others_have_one_lane() -> None:
    with serving(lanes=1) as rig:
        rig.runner.concurrent = False
        rig.tell(control.SetThreads(1, 3))
        rig.settle()
        assert rig.executor.lanes == 1 and rig.lanes == []


def test_another_policy_may_start_what_waits() -> None:
    with serving(lanes=1) as rig:
        rig.scheduler.set_policy(1, {"policy": "window", "max_delay_ms": 5}, 0, StageFacts())
        rig.send(1)
        rig.settle()
        assert rig.engine.at == "asleep"
        rig.tell(control.SetPolicy(1, {"policy": "none"}, threads=1, epoch=2))
        rig.settle()
        assert rig.engine.at == "computes"
