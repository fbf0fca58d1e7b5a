"""Who is blamed for a worker's death: suspects run alone, and two deaths at work are poison."""

from __future__ import annotations

from recovery_rig import World, codes, done

from blockflow.dispatcher.entry import SendAgain
from blockflow.dispatcher.recovery import Death


def test_two_deaths_at_work_alone_are_poison() -> None:
    w = World(trunk=[1], head_a=[9])
    entry = w.admit("a")
    assert w.die(1, entry) == []
    assert w.publish(trunk=[2], head_a=[9]) == [SendAgain(entry)]
    assert entry.item(0).alone
    assert w.die(2, entry) == done(entry)
    assert codes(entry) == ["POISON"]
    assert w.table.gauges()["poisoned"] == 1


def test_batch_mates_run_one_at_a_time_and_are_not_blamed() -> None:
    w = World(trunk=[1], head_a=[9])
    mate, poison, other = (w.admit("a") for _ in range(3))
    bystander = w.admit("a")  # queued in the same worker, not at work
    assert w.die(1, mate, poison, other) == []
    # One suspect at a time; who was not at work goes at once.
    assert w.publish(trunk=[2], head_a=[9]) == [SendAgain(mate), SendAgain(bystander)]
    assert w.answer(mate) == [*done(mate), SendAgain(poison)]
    assert w.answer(bystander) == done(bystander)
    assert w.die(2, poison) == done(poison)
    assert codes(poison) == ["POISON"]
    assert w.publish(trunk=[3], head_a=[9]) == [SendAgain(other)]
    assert (other.attempt, other.deaths) == (2, 1)
    assert w.answer(other) == done(other)


def test_several_at_work_twice_blame_nobody() -> None:
    """Lanes: a request that runs alone in its batch may still die beside another batch."""
    w = World(trunk=[1], head_a=[9])
    entry = w.admit("a")
    w.die(1, entry)
    w.publish(trunk=[2], head_a=[9])
    fresh = w.admit("a")
    assert w.die(2, entry, fresh) == []
    assert (entry.deaths, fresh.deaths) == (2, 1)
    assert w.publish(trunk=[3], head_a=[9]) == [SendAgain(entry)]
    assert w.die(3, entry) == [*done(entry)]
    assert codes(entry) == ["POISON"]


def test_a_suspect_waits_only_for_workers_that_it_visits_too() -> None:
    w = World(trunk=[1], other=[4])
    paths = {"a": ("trunk",), "z": ("other",)}
    w.publish(trunk=[1], other=[4], paths=paths)
    here, there = w.admit("a"), w.admit("z")
    w.die(1, here)
    w.die(4, there)
    assert w.publish(trunk=[2], other=[5], paths=paths) == [SendAgain(here), SendAgain(there)]


def test_a_suspect_that_has_to_wait_makes_room_for_the_next() -> None:
    w = World(trunk=[1], head_a=[9])
    first, second = w.admit("a"), w.admit("t")
    w.die(1, first, second)
    assert w.publish(trunk=[2], head_a=[9]) == [SendAgain(first)]
    assert w.die(9) == [SendAgain(second)]
    assert first.waits_for == "a worker of block 'head_a'"


def test_an_older_attempt_that_kills_a_worker_counts_as_well() -> None:
    w = World(trunk=[1], head_a=[2, 3])
    entry = w.admit("a")
    old = entry.ticket + bytes([1, 0])
    w.die(entry.plan.incarnations[1])
    assert entry.attempt == 2
    w.table.peer_gone(Death.of(88, [old]), 0)
    assert (entry.deaths, entry.attempt) == (1, 2)


def test_what_was_at_work_may_have_ended() -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    assert w.answer(entry) == done(entry)
    assert w.die(1, entry) == []


def test_what_a_dead_worker_reports_may_be_nonsense() -> None:
    w = World(trunk=[1, 2], head_a=[3])
    entry = w.admit("a")
    records = [b"", b"x" * 17, entry.ticket + b"\x01\xff", b"u" * 18]
    records.append(entry.ticket + bytes([1, len(entry.plan.tree.nodes)]))
    out = w.table.peer_gone(Death.of(entry.plan.incarnations[0], records), 0)
    assert w.rest(out) == [SendAgain(entry)]


def test_company_that_has_ended_meanwhile_was_company_all_the_same() -> None:
    """It may have been its input, although nobody waits for that any more."""
    w = World(trunk=[1], head_a=[9])
    entry = w.admit("a")
    w.die(1, entry)
    w.publish(trunk=[2], head_a=[9])
    ended = w.admit("a")
    assert w.rest(w.table.cancel(ended.client, ended.request_id)) == done(ended)
    assert w.die(2, entry, ended) == []
    assert entry.deaths == 2
    assert w.publish(trunk=[3], head_a=[9]) == [SendAgain(entry)]
    assert w.answer(entry) == done(entry)
    assert codes(entry) == []


def test_where_an_older_attempt_was_proves_nothing_of_the_present_one() -> None:
    """The first attempt still computes in a branch where the second one's block may have begun."""
    w = World(once=["head_a"], trunk=[1], head_a=[9])
    entry = w.admit("a")
    w.die(1, unsent=[entry])
    assert w.publish(trunk=[2], head_a=[9]) == [SendAgain(entry)]
    older = entry.ticket + bytes([1, 0])
    assert w.rest(w.table.peer_gone(Death.of(9, [older]), 0)) == done(entry)
    assert codes(entry) == ["WORKER_LOST"]
