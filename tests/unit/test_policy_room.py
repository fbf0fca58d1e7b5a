"""The fair order of the waiting room: priority, weights, deadlines, limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rig import MS, query

from blockflow.batching.policy import Query
from blockflow.batching.room import Group, WaitingRoom
from blockflow.batching.row_costs import RowCosts
from blockflow.batching.shares import TaskShare, share_problems

HERE: Group = (1, (4,))


def room(*shares: TaskShare) -> WaitingRoom:
    return WaitingRoom(shares or (TaskShare(),), lambda q: (q.stage, q.shape), RowCosts(()))


def serve(r: WaitingRoom, limit: int, group: Group = HERE) -> list[int]:
    picked = r.pick(group, limit)
    r.serve(group, picked)
    return [q.key for q in picked]


def test_the_earliest_deadline_goes_first() -> None:
    r = room()
    for key, deadline in ((1, 30), (2, 10), (3, 20)):
        r.add(query(key, 0, deadline_ms=deadline))
    assert r.most_urgent(HERE).key == 2
    assert serve(r, 2) == [2, 3] and serve(r, 2) == [1] and len(r) == 0
    assert serve(r, 2) == []


def test_equal_deadlines_in_the_order_of_arrival() -> None:
    r = room()
    for key in (3, 1, 2):
        r.add(query(key, 0))
    assert serve(r, 9) == [1, 2, 3]


def test_rows_are_counted_and_large_requests_are_not_overtaken() -> None:
    r = room()
    for key, rows in ((1, 2), (2, 5), (3, 1)):
        r.add(query(key, key, rows=rows))
    assert r.rows(HERE) == 8
    assert serve(r, 4) == [1]
    assert serve(r, 4) == [2]  # larger than the limit: alone
    assert serve(r, 4) == [3]


def test_a_batch_under_way_has_used_some_of_the_limit() -> None:
    r = room()
    r.add(query(1, 0, rows=3))
    aboard = [query(9, 0, rows=2)]
    assert r.pick(HERE, 4, aboard=aboard) == []
    assert [q.key for q in r.pick(HERE, 5, aboard=aboard)] == [1]
    assert len(r) == 1, "picking takes nothing away"


def test_priority_beats_weight_and_deadline() -> None:
    r = room(TaskShare(weight=100), TaskShare(priority=2))
    r.add(query(1, 0, deadline_ms=1))
    r.add(query(2, 0, task=1))
    assert r.most_urgent(HERE).key == 1
    assert serve(r, 1) == [2]


def test_weights_share_the_rows() -> None:
    r = room(TaskShare(weight=2), TaskShare(weight=1))
    for key in range(60):
        r.add(query(key, key, task=key % 2, rows=1 + key % 3))
    rows: Counter[int] = Counter()
    for _ in range(6):
        picked = r.pick(HERE, 8)
        r.serve(HERE, picked)
        for q in picked:
            rows[q.task] += q.rows
    assert rows[0] == pytest.approx(2 * rows[1], abs=2 * 3 + 3)


def test_who_was_away_has_saved_nothing() -> None:
    r = room(TaskShare(), TaskShare())
    for key in range(10):
        r.add(query(key, 0))
    serve(r, 6)
    for key in range(10, 20):
        r.add(query(key, 0, task=1))
    assert Counter(k >= 10 for k in serve(r, 6)) == {False: 3, True: 3}


def test_fair_between_tasks_of_different_shapes() -> None:
    r = room(TaskShare(), TaskShare())
    for key in range(30):  # task 0 came first, with earlier deadlines and more of them
        r.add(query(key, 0, deadline_ms=10))
    for key in range(30, 40):
        r.add(query(key, 0, task=1, shape=(8,)))
    served = Counter()
    for _ in range(10):
        group = r.first()
        assert group is not None
        served[group[1]] += len(serve(r, 2, group))
    assert served == {(4,): 10, (8,): 10}


def test_a_task_has_its_limit_in_a_batch() -> None:
    r = room(TaskShare(max_batch_rows=2), TaskShare())
    for key in range(6):
        r.add(query(key, key, task=key // 3))
    assert Counter(k // 3 for k in serve(r, 9)) == {0: 2, 1: 3}
    assert serve(r, 9) == [2]
    r.add(query(9, 9, rows=5))
    assert serve(r, 9) == [9]  # larger than its limit: once, by itself
    r.add(query(10, 9, rows=1))
    assert r.pick(HERE, 9, aboard=[query(11, 0, rows=2)]) == []


def test_a_batch_under_way_takes_of_the_others_as_many_as_it_may_have() -> None:
    r = room(TaskShare(), TaskShare(max_batch_rows=2), TaskShare(max_batch_rows=2))
    aboard = [query(1, 0, rows=2), query(2, 0, task=1)]
    others = [
        query(key, 0, task=task, rows=rows)
        for key, task, rows in ((3, 0, 7), (4, 2, 3), (5, 1, 2), (6, 1, 1), (7, 2, 1), (8, 0, 1))
    ]
    found = r.with_company(aboard, others, 8)
    assert [q.key for q in found] == [1, 2, 4, 6, 8], "4 is over its limit by itself: once"
    assert r.with_company(aboard, others, 8, lambda _, q: q.key != 6) == found[:3]


def test_who_is_as_urgent_as_some_of_a_group_does_not_outrank_it() -> None:
    r = room(TaskShare(), TaskShare(priority=1), TaskShare(priority=2))
    for key, task in ((1, 0), (2, 1)):
        r.add(query(key, 0, task=task))
    for stage, task in ((2, 1), (3, 2)):
        r.add(query(10 * stage, 0, stage=stage, task=task))
    assert not r.outranked(HERE, {3}) and r.outranked(HERE, {2})


def test_an_unknown_task_counts_as_the_first() -> None:
    r = room(TaskShare(), TaskShare())
    for key, task in ((1, 7), (2, -3)):
        r.add(query(key, 0, task=task))
    assert len(r.with_company([query(3, 0, task=2)], [query(4, 0, task=-1)], 9)) == 2
    assert serve(r, 9) == [1, 2]
    r.add(query(5, 0, task=2))
    assert r.remove(5) is not None and list(r.groups) == []


def test_removal_and_ages() -> None:
    r = room()
    for key in range(4):
        r.add(query(key, key * MS, first=key != 2))
    assert r.since(HERE) == 0 and r.inner(HERE) == 1
    assert r.remove(2) is not None and r.inner(HERE) == 0
    assert r.remove(0) is not None and r.since(HERE) == MS
    assert r.remove(0) is None and r.rows(HERE) == 2
    r.add(query(6, 0, stage=2))
    assert r.remove(6) is not None and list(r.groups) == [HERE]
    r.add(query(5, 0, first=False))
    assert serve(r, 1) == [5] and r.inner(HERE) == 0, "it is due first, and gone now"
    assert serve(r, 9) == [1, 3] and list(r.groups) == [] and r.first() is None


@settings(max_examples=80, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=3),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 4), st.integers(1, 3)),
            st.tuples(st.just("serve"), st.integers(1, 9), st.just(0), st.just(0)),
            st.tuples(st.just("remove"), st.integers(0, 40), st.just(0), st.just(0)),
        ),
        max_size=60,
    ),
)
def test_books_stay_right(
    weights: Sequence[float], events: Sequence[tuple[str, int, int, int]]
) -> None:
    r = room(*(TaskShare(weight=w) for w in weights))
    there: dict[int, Query] = {}
    for key, (what, a, b, c) in enumerate(events):
        if what == "add":
            there[key] = query(key, key, task=a, rows=b, shape=(c,))
            r.add(there[key])
        elif what == "remove":
            assert (r.remove(a) is None) == (a not in there)
            there.pop(a, None)
        else:
            group = r.first()
            assert (group is None) == (not there)
            if group is not None:
                picked = r.pick(group, a)
                assert picked and (sum(q.rows for q in picked) <= a or len(picked) == 1)
                r.serve(group, picked)
                for q in picked:
                    assert there.pop(q.key).shape == group[1]
        assert {q.key for q in r} == set(there) and len(r) == len(there)
        for group in r.groups:
            mine = [q for q in there.values() if (q.stage, q.shape) == group]
            assert r.rows(group) == sum(q.rows for q in mine)
            assert r.most_urgent(group).deadline_ns == min(q.deadline_ns for q in mine)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tasks_that_all_wait_get_their_shares(data: st.DataObject) -> None:
    """Whatever was served before, from when all tasks wait on none gets more than its share by
    more than about a request for each of them."""
    weights = data.draw(st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=2, max_size=4))
    r = room(*(TaskShare(weight=w) for w in weights))
    key = 0
    for task in range(data.draw(st.integers(0, len(weights)))):
        for _ in range(data.draw(st.integers(0, 8))):
            r.add(query(key, key, task=task))
            key += 1
    serve(r, data.draw(st.integers(0, 20)))
    rng = data.draw(st.randoms(use_true_random=True))  # of hundreds of draws, one by one are dear
    for task in range(len(weights)):
        for _ in range(80):
            r.add(query(key, key, task=task, rows=rng.choice([1, 2])))
            key += 1
    before = Counter[int]()
    for _ in range(data.draw(st.integers(2, 6))):
        picked = r.pick(HERE, 10)
        r.serve(HERE, picked)
        for q in picked:
            before[q.task] += q.rows
    normal = [before[t] / w for t, w in enumerate(weights)]
    assert max(normal) - min(normal) <= 2 * 2 / min(weights) + 2


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_priority_weight_deadline_and_limit_hold_together(data: st.DataObject) -> None:
    """Of each batch: within a task the earliest deadlines; nobody before one of a higher priority,
    unless that one's task has had its limit; and in the end everybody, also of the least priority.
    """
    draw = data.draw
    caps = st.sampled_from([0, 0, 2, 3])
    shares = [
        TaskShare(draw(st.sampled_from([0.5, 1.0, 4.0])), draw(st.integers(0, 2)), draw(caps))
        for _ in range(draw(st.integers(1, 4)))
    ]
    r = room(*shares)
    left: dict[int, Query] = {}
    for key in range(draw(st.integers(1, 25))):
        task, rows = draw(st.integers(0, len(shares) - 1)), draw(st.sampled_from([1, 1, 2, 5, 9]))
        left[key] = query(key, 0, task=task, rows=rows, deadline_ms=draw(st.integers(1, 9)))
        r.add(left[key])
    while left:
        picked = [left.pop(key) for key in serve(r, draw(st.integers(1, 8)))]
        assert picked
        used = Counter[int]()
        for q in picked:
            used[q.task] += q.rows
        for task, share in enumerate(shares):
            mine = [q for q in picked if q.task == task]
            assert len(mine) <= 1 or not share.max_batch_rows or used[task] <= share.max_batch_rows
            others = [q for q in left.values() if q.task == task]
            if not others:
                continue
            following = min(others, key=lambda q: (q.deadline_ns, q.key))
            assert all(q.deadline_ns <= following.deadline_ns for q in mine)
            capped = share.max_batch_rows and used[task] + following.rows > share.max_batch_rows
            if not (mine and capped):
                assert all(shares[q.task].priority >= share.priority for q in picked)


def test_nobody_joins_before_one_of_a_higher_priority_whose_task_has_had_its_limit() -> None:
    r = room(TaskShare(), TaskShare(), TaskShare(priority=1, max_batch_rows=2))
    aboard = [query(1, 0, task=2, rows=2)]
    for key, task in ((2, 0), (3, 2), (4, 1)):
        r.add(query(key, 0, task=task))
    assert [q.key for q in r.pick(HERE, 8, None, aboard)] == []
    assert [q.key for q in r.pick(HERE, 8)] == [3, 2, 4]  # a new batch makes nobody wait
    assert r.remove(3) is not None
    assert [q.key for q in r.pick(HERE, 8, None, aboard)] == [2, 4]


def test_equals_join_beside_a_task_that_has_had_its_limit() -> None:
    r = room(TaskShare(), TaskShare(max_batch_rows=2))
    for key, task in ((2, 1), (3, 0)):
        r.add(query(key, 0, task=task))
    assert [q.key for q in r.pick(HERE, 8, None, [query(1, 0, task=1, rows=2)])] == [3]


def test_shares_are_checked() -> None:
    found = share_problems({"weight": 0, "priority": 11, "wieght": 1}, "$.tasks.a.share")
    assert [p.path for p in found] == [
        "$.tasks.a.share.weight",
        "$.tasks.a.share.priority",
        "$.tasks.a.share.wieght",
    ]
    assert "weight" in found[2].hint
    assert TaskShare.from_dict({"weight": 2}) == TaskShare(2)
    assert TaskShare.from_dict(TaskShare(3, 1, 4).to_dict()) == TaskShare(3, 1, 4)
    with pytest.raises(ValueError, match="weight"):
        TaskShare.from_dict({"weight": -1})
