"""Turns of those who come to a stage, in several lanes: what a task has had there, and its age."""

from __future__ import annotations

from policy_rig import MS, query

from blockflow.batching.meetings import Meetings
from blockflow.batching.policy import Query
from blockflow.batching.shares import TaskShare


def waits(key: int, task: int, rows: int = 1) -> Query:
    return query(key, key * MS, task=task, rows=rows, first=False)


def turns(meetings: Meetings, number: int) -> list[int]:
    """Tasks in the order of their turns, while 0 and 1 wait all the time."""
    found = []
    for _ in range(number):
        first = next(meetings.in_turn([waits(1, 0), waits(2, 1)]))
        meetings.served([first])
        found.append(first.task)
    return found


def test_a_task_that_was_away_has_saved_nothing_up() -> None:
    meetings = Meetings([TaskShare(), TaskShare()])
    for key in range(10):
        meetings.served([waits(key, 0)])
    assert sorted(turns(meetings, 6)) == [0, 0, 0, 1, 1, 1]


def test_a_batch_counts_with_all_of_its_rows() -> None:
    meetings = Meetings([TaskShare(), TaskShare()])
    meetings.served([waits(1, 0, rows=2), waits(2, 0, rows=3), waits(3, 1)])
    assert turns(meetings, 5) == [1, 1, 1, 1, 0]


def test_of_each_task_the_oldest_comes_first() -> None:
    meetings = Meetings([TaskShare(), TaskShare(priority=1)])
    waiting = [waits(key, task) for key, task in ((5, 0), (9, 1), (3, 0), (8, 1), (4, 0), (2, 0))]
    assert [q.key for q in meetings.in_turn(waiting)] == [8, 9, 2, 3, 4, 5]


def test_an_unknown_task_has_the_turns_of_the_first() -> None:
    meetings = Meetings([TaskShare(), TaskShare()])
    for task in (2, 7, -1):
        meetings.served([waits(task, task)])
    assert meetings.rank(waits(1, 7))[:2] == meetings.rank(waits(1, 0))[:2] == (0, 3.0)
    assert [q.task for q in meetings.in_turn([waits(1, 7), waits(2, -1)])] == [7, -1]
