"""The batch table: new, stretch, split, and the paper's example of all three (its figure 8)."""

from __future__ import annotations

from policy_rig import query

from blockflow.batching.batch_table import BatchTable, Part
from blockflow.batching.convoy import Convoy, Convoys
from blockflow.batching.policy import ELSEWHERE


def sizes(table: BatchTable) -> list[tuple[int, int]]:
    return [(row.id, row.size) for row in table]


def test_the_papers_example() -> None:
    table, convoys = BatchTable(), Convoys()
    batch0 = table.new(0, 5)
    convoys.join(batch0, [query(1, 0), query(2, 0)])
    assert sizes(table) == [(0, 2)] and table.newest is batch0.row
    batch0.level = 1  # executor 1 has finished both; executor 2 works on them
    assert (batch0.row.finished(0), batch0.row.finished(1)) == (2, 0)

    behind = table.stretch(batch0.row, 0)
    convoys.join(behind, [query(3, 0), query(4, 0)])
    assert sizes(table) == [(0, 4)]
    batch0.level = 2
    assert (batch0.row.finished(0), batch0.row.finished(1)) == (2, 2)
    assert not batch0.row.complete_before(batch0) and batch0.row.complete_before(behind)
    behind.level = 2
    assert batch0.row.complete_before(batch0)
    convoys.join(batch0, list(behind.waiting.values()))
    table.remove(behind)
    assert batch0.row.finished(1) == batch0.row.size == 4

    batch0.level = 3
    half = table.split(batch0, 3, serial=True)
    convoys.join(half, [query(3, 0), query(4, 0)])
    assert sizes(table) == [(0, 2), (1, 2)]
    assert batch0.row.closed and half.row.closed and table.newest is None
    assert half.row.serial and not table.first_of_origin(half.row)
    table.remove(batch0)
    assert table.first_of_origin(half.row)


def test_children_keep_the_place_and_the_age_of_their_parent() -> None:
    table = BatchTable()
    old, new = table.new(0, 10), table.new(0, 20)
    child = table.split(old, 1)
    grandchild = table.split(child, 1)
    assert [row.id for row in table] == [0, 2, 3, 1]
    assert grandchild.row.created_ns == 10 and grandchild.row.origin == 0
    assert table.newest is new.row, "a split of an older batch makes nobody newer"
    table.remove(new)
    assert table.newest is None and len(table) == 3


def test_rows_that_run_count() -> None:
    table, convoys = BatchTable(), Convoys()
    part = table.new(0, 0)
    queries = [query(1, 0, rows=2), query(2, 0, rows=3)]
    convoys.join(part, queries)
    convoys.start(part, queries)
    assert part.row.size == 5 and not part.waiting
    assert convoys.done(1, [1, 2]) is part
    assert set(part.landed) == {1, 2}
    again = queries[1]._replace(stage=2, first=False)
    assert convoys.arrive(again) and not convoys.arrive(query(9, 0))
    branch = queries[1]._replace(key=7, stage=3, first=False, origin=2)
    assert convoys.arrive(branch), "a branch travels with the convoy that it comes from"
    assert not convoys.arrive(query(8, 0, first=False)), "it was in no batch of these"
    assert not convoys.arrive(again._replace(origin=ELSEWHERE)), "nor in their last one"
    assert convoys.settle() == [part] and set(part.waiting) == {2, 7}
    assert {q.key for q in convoys} == {2, 7}
    assert isinstance(convoys.drop(2), Part) and convoys.drop(2) is None
    assert not convoys.arrive(query(11, 0, first=False)), "nothing has just landed"


def test_two_batches_at_one_stage_are_told_apart() -> None:
    convoys = Convoys()
    table = BatchTable()
    one, two = table.new(0, 0), table.new(0, 0)
    for part, key in ((one, 1), (two, 2)):
        convoys.join(part, [query(key, 0)])
        convoys.start(part, [query(key, 0)])
    assert convoys.done(1, [2]) is two
    assert convoys.done(9, [1]) is convoys.done(1, [2]) is None
    assert convoys.done(1, [1]) is one


def test_whom_a_part_lets_go_on_first() -> None:
    """The rest of its batch, what it was split from, and who is ahead on its pair."""
    table = BatchTable()

    def others(part: Part) -> list[Part]:
        return [other for other in table.before(part) if other is not part]

    front = table.new(0, 0)
    front.level = front.at = 2
    front.pair = 0
    behind = table.stretch(front.row, 0)
    behind.pair = 1
    assert others(front) == [behind] and others(behind) == []
    second = table.new(0, 0)
    second.pair = 0
    assert others(second) == [front] and others(front) == [behind]
    second.pair = None
    assert others(second) == [front, behind], "it could take the place of each"
    second.at = 1
    assert others(second) == [front]
    second.at = 3
    assert others(second) == []
    later = table.split(front, 2, serial=True)
    later.pair = 2
    assert others(later) == [front, behind] and others(front) == [behind]
    branch = table.split(front, 3)
    branch.pair = 3
    assert others(branch) == [], "its branches need not go one after the other"
    first, last = table.new(0, 0), table.new(0, 0)
    assert table.first_of_origin(first.row) and table.first_of_origin(last.row)
    assert table.first_of_origin(front.row) and not table.first_of_origin(later.row)


def test_who_has_landed_goes_on_with_his_convoy_and_who_has_not_does_not() -> None:
    convoys, convoy = Convoys(), Convoy()
    one, two, three = (query(key, 0, first=False) for key in (1, 2, 3))
    convoys.join(convoy, [one, two, three])
    convoys.start(convoy, [one, two])
    assert set(convoy.running) == {1, 2} and set(convoy.waiting) == {3}
    assert convoys.drop(2) is None and set(convoy.running) == {1, 2}, "it runs"
    branch = three._replace(key=7, stage=3, origin=3)
    assert not convoys.arrive(branch), "nobody of them has just run"
    assert convoys.done(1, []) is None and convoys.done(1, [1, 2]) is convoy
    assert convoys.arrive(one._replace(stage=2)) and convoys.arrive(two._replace(stage=2))
    assert convoys.drop(2) is None and convoys.drop(3) is None, "the convoy is yet to settle"
    assert convoys.settle() == [convoy] and not convoys.settle()
    assert not convoys.arrive(two._replace(stage=2)), "it has left"
    assert convoys.drop(1) is convoy and convoy.empty


def test_who_rests_with_a_part_is_behind_it_whole_and_could_go_on() -> None:
    table, convoys = BatchTable(), Convoys()
    parts = [table.new(1, now) for now in range(7)]
    older, part, running, elsewhere, lacking, halved, last = parts
    half = table.split(halved, 1, serial=True)
    table.stretch(lacking.row, 0)
    for key, one in enumerate((*parts, half)):
        convoys.join(one, [query(key, 0)])
    convoys.start(running, list(running.waiting.values()))
    elsewhere.level = 2
    assert table.resting_with(part) == [halved, last]
    assert table.resting_with(older) == [part, halved, last]
    assert table.resting_with(lacking) == [], "the rest of its own batch is not there"
    table.remove(halved)
    assert table.resting_with(part) == [half, last]
