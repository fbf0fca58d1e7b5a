"""Whose turn it is, request by request: service counts rows, and nobody gains by being away."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from policy_rig import query

from blockflow.batching.room import Group, WaitingRoom
from blockflow.batching.row_costs import RowCosts
from blockflow.batching.shares import TaskShare

HERE: Group = (1, (4,))
THERE: Group = (1, (8,))


class Room:
    """A waiting room of tasks A, B, ...; a query's task is read off its key, 10 * number + task."""

    def __init__(self, *shares: TaskShare) -> None:
        self.room = WaitingRoom(shares, lambda q: (q.stage, q.shape), RowCosts(()))
        self._numbers = count(1)

    def come(
        self, task: int, rows: int = 1, times: int = 1, shape: tuple[int, ...] = (4,)
    ) -> list[int]:
        keys = [10 * next(self._numbers) + task for _ in range(times)]
        for key in keys:
            self.room.add(query(key, 0, task=task, rows=rows, shape=shape))
        return keys

    def batch(self, limit: int) -> list[int]:
        """The tasks of the next batch of the group whose turn it is."""
        group = self.room.first()
        assert group is not None
        picked = self.room.pick(group, limit)
        self.room.serve(group, picked)
        return [q.task for q in picked]

    def one_by_one(self, steps: int) -> list[int]:
        return [task for _ in range(steps) for task in self.batch(1)]

    def one_at_a_time(self, task: int, steps: int, rows: int = 1) -> list[int]:
        """Turns while that task has one request at a time, beside those who wait."""
        served = []
        for _ in range(steps):
            if not any(q.task == task for q in self.room):
                self.come(task, rows=rows)
            served += self.one_by_one(1)
        return served


A, B = 0, 1
EQUAL = (TaskShare(), TaskShare())


def rows(tasks: Iterable[int], of_a: int) -> tuple[int, int]:
    """How many rows of A and of B those were; one of B is one row."""
    found = list(tasks)
    return of_a * found.count(A), found.count(B)


def test_service_is_counted_in_rows_from_batch_to_batch() -> None:
    r = Room(*EQUAL)
    r.come(A, rows=4, times=10)
    r.come(B, times=40)
    large, small = rows(r.one_by_one(25), of_a=4)
    assert abs(large - small) <= 4


def test_service_is_counted_in_rows_within_a_batch() -> None:
    r = Room(*EQUAL)
    r.come(A, rows=4, times=10)
    r.come(B, times=40)
    assert rows(r.batch(16), of_a=4) == (8, 8)


def test_a_request_that_does_not_fit_ends_the_batch() -> None:
    """Small ones of other tasks do not go before it: they might for ever."""
    r = Room(*EQUAL)
    r.come(A)
    r.come(A, rows=4)
    r.come(B, times=9)
    assert r.batch(4) == [A, B]
    assert r.batch(4) == [A]


def test_who_comes_back_at_once_has_had_what_it_has_had() -> None:
    """A task with one request at a time, each of four rows, beside one that always waits."""
    r = Room(*EQUAL)
    r.come(B, times=100)
    large, small = rows(r.one_at_a_time(A, 25, rows=4), of_a=4)
    assert abs(large - small) <= 5


def test_who_comes_while_a_large_request_runs_begins_with_it() -> None:
    r = Room(*EQUAL)
    r.come(A, rows=8, times=3)
    assert r.batch(1) == [A]
    r.come(B, times=20)
    assert r.one_by_one(8) == [B] * 8


def test_a_task_that_is_more_urgent_comes_first_in_another_group_as_well() -> None:
    r = Room(TaskShare(), TaskShare(priority=1))
    r.come(B, times=4)
    assert r.one_by_one(3) == [B] * 3
    r.come(A, shape=(8,))
    assert r.room.first() == HERE
    assert r.one_by_one(2) == [B, A]


def test_what_more_urgent_tasks_have_had_is_no_debt_of_the_others() -> None:
    r = Room(*EQUAL, TaskShare(priority=1))
    r.come(2, rows=8, times=5)
    assert r.one_by_one(5) == [2] * 5
    r.come(A, times=20)
    assert r.one_by_one(2) == [A, A]
    r.come(2, rows=8)
    assert r.one_by_one(1) == [2]
    r.come(B, times=20)
    assert r.one_by_one(8).count(B) >= 4


def test_who_comes_back_after_a_while_has_saved_nothing_up() -> None:
    r = Room(*EQUAL)
    r.come(A, times=2)
    r.come(B, times=60)
    assert sorted(r.one_by_one(4)) == [A, A, B, B]
    assert r.one_by_one(20) == [B] * 20
    assert 4 <= r.one_at_a_time(A, 10).count(A) <= 6


def test_who_has_gone_unserved_was_away() -> None:
    r = Room(*EQUAL)
    (gone,) = r.come(A)
    r.come(B, times=40)
    assert r.room.remove(gone) is not None
    assert r.one_by_one(20) == [B] * 20
    assert 4 <= r.one_at_a_time(A, 10).count(A) <= 6


def test_who_is_overtaken_by_others_of_its_task_has_its_turn() -> None:
    """A's many ride in the batches that B's few begin. One of another shape has come before them,
    and waits for a turn of A's."""
    r = Room(*EQUAL)
    r.come(B, times=2)
    r.come(A, times=6)
    assert r.batch(8) == [B, A, B, A, A, A, A, A]
    (alone,) = r.come(A, shape=(8,))
    for _ in range(10):
        r.come(B)
        r.come(A, times=3)
        r.batch(8)
    assert alone not in {q.key for q in r.room}


def test_the_turn_that_is_kept_is_the_tasks() -> None:
    """Its earliest deadline has it, also if that has come since; and it is one turn."""
    r = Room(*EQUAL)
    r.come(B)
    r.come(A, times=4)
    r.batch(8)
    r.room.add(query(1001, 0, task=A, shape=(8,), deadline_ms=900))
    r.come(B)
    r.come(A, times=4)
    assert r.batch(8) == [B, A, A, A, A]  # B had its turn, and 1001 is overtaken
    r.room.add(query(1002, 0, task=A, shape=(16,), deadline_ms=800))
    r.come(B, times=2)
    r.come(A, times=8)
    assert r.room.first() == (1, (16,))
    assert r.batch(8) == [A]
    assert r.batch(2) == [B, B]


def test_who_is_gone_keeps_no_turn_from_the_next() -> None:
    r = Room(*EQUAL)
    gone: list[int] = []
    for _ in range(3):
        r.come(B)
        r.come(A, times=4)
        assert r.batch(8) == [B, A, A, A, A]
        assert all(r.room.remove(key) is not None for key in gone)
        gone = r.come(A, shape=(8,))
    r.come(B)
    r.come(A, times=4)
    assert r.batch(8) == [B, A, A, A, A]
    r.come(B)
    assert r.room.first() == THERE
