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


def batches(meetings: Meetings, first: Query, number: int) -> list[list[int]]:
    """The tasks in batches while ``first`` of task 0 waits beside one query of task 1 at a time,
    with which three more of task 0 ride; until ``first`` has his turn."""
    found: list[list[int]] = []
    for key in range(100, 100 + 10 * number, 10):
        others = [waits(key, 1), *(waits(key + i, 0) for i in range(1, 4))]
        firsts = [(query, meetings.rank(query)) for query in (first, others[0])]
        head = min(firsts, key=lambda entry: entry[1])[0]
        batch = [first] if head is first else others
        meetings.served(batch, firsts)
        found.append([q.task for q in batch])
        if head is first:
            break
    return found


def test_who_cannot_ride_with_others_of_his_task_has_his_turn() -> None:
    """Task 0 has had a hundred rows more than 1, all in batches that 1 began. Its oldest, which has
    another shape, comes behind the next one of task 1."""
    meetings = Meetings([TaskShare(), TaskShare()])
    for key in range(1, 34):
        meetings.served([waits(2 * key, 1), waits(2 * key + 1, 0, rows=4)])
    assert batches(meetings, waits(90, 0), 9) == [[1, 0, 0, 0], [0]]


def test_a_large_one_that_is_overtaken_waits_for_as_many_rows_as_its_own() -> None:
    meetings = Meetings([TaskShare(), TaskShare()])
    for key in range(1, 34):
        meetings.served([waits(2 * key, 1), waits(2 * key + 1, 0, rows=4)])
    assert len(batches(meetings, waits(90, 0, rows=4), 9)) == 5


def test_a_turn_that_was_kept_is_for_one_query() -> None:
    """The next one of the task has had all that has ridden."""
    meetings = Meetings([TaskShare(), TaskShare()])
    for key in range(1, 34):
        meetings.served([waits(2 * key, 1), waits(2 * key + 1, 0, rows=4)])
    batches(meetings, waits(90, 0), 9)
    assert meetings.rank(waits(91, 0))[1] > 100
    assert meetings.rank(waits(90, 0))[1] > 100, "and it is gone"


def test_who_waits_with_one_whose_turn_was_kept_comes_by_what_his_task_has_had() -> None:
    meetings = Meetings([TaskShare(), TaskShare()])
    for key in range(1, 4):
        firsts = [(query, meetings.rank(query)) for query in (waits(1, 0), waits(10 * key, 1))]
        meetings.served([waits(10 * key, 1), waits(10 * key + 1, 0, rows=4)], firsts)
    waiting = [waits(1, 0), waits(2, 0), *(waits(key, 1) for key in range(40, 48))]
    assert [q.key for q in meetings.in_turn(waiting)][:3] == [1, 40, 41]


def test_the_turn_of_one_who_is_gone_is_kept_for_nobody_after_him() -> None:
    """He was withdrawn, say."""
    meetings = Meetings([TaskShare(), TaskShare()])
    for key in range(1, 34):
        meetings.served([waits(2 * key, 1), waits(2 * key + 1, 0, rows=4)])
    gone = waits(90, 0)
    meetings.served([waits(100, 1), waits(101, 0)], [(gone, meetings.rank(gone))])
    assert meetings.rank(gone)[1] < 100 < meetings.rank(waits(91, 0))[1]
