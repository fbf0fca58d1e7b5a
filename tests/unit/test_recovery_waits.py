"""Between two attempts: what waits is spared by rumours, and makes room for others of its kind."""

from __future__ import annotations

from dataclasses import replace

from recovery_rig import PATHS, SECOND, World, codes, done, message

from blockflow.core.errors import RequestError
from blockflow.core.routing import CanaryRoute
from blockflow.dispatcher.entry import QUARANTINE, Entry, ReleaseInput, SendAgain

TRUNK, HEAD_A, HEAD_B = 1, 2, 4


def two_suspects(w: World) -> tuple[Entry, Entry]:
    """The first one is under way, the second one waits for it."""
    first, second = w.admit("a", "b"), w.admit("t")
    assert w.die(TRUNK, first, second) == []
    assert w.publish(trunk=[5], head_a=[HEAD_A], head_b=[HEAD_B]) == [SendAgain(first)]
    assert second.waits_for == QUARANTINE
    return first, second


def test_a_rumour_does_not_fail_what_is_to_be_run_again() -> None:
    w = World(once=["head_b"], trunk=[TRUNK], head_a=[HEAD_A, 3], head_b=[HEAD_B])
    entry = w.admit("a", "b")
    end = entry.plan.ends[0]
    gone = RequestError("WORKER_LOST", "the next hop's worker is gone")
    assert w.table.failure(entry.ticket, 1, end, TRUNK, gone, 0) == []
    assert w.die(entry.plan.incarnations[end]) == []  # and so it is; "b" goes on
    w.table.tick(6 * SECOND)
    assert (entry.lost, entry.outcomes) == ({end}, {})
    assert w.answer(entry, end=1) == [SendAgain(entry)]
    assert w.answer(entry) == done(entry)


def test_a_rumour_puts_off_no_deadline() -> None:
    w = World(trunk=[TRUNK], head_a=[HEAD_A])
    doubtful, soon = w.admit("a"), w.admit("a", deadline_ns=SECOND)
    gone = RequestError("WORKER_LOST", "the next hop's worker is gone")
    w.table.failure(doubtful.ticket, 1, 1, TRUNK, gone, 0)
    assert w.table.next_deadline() == SECOND
    assert w.table.tick(SECOND) == done(soon)
    assert w.table.cancel(b"client", doubtful.request_id) == done(doubtful)
    assert w.table.next_deadline() == 5 * SECOND
    assert (w.table.tick(5 * SECOND), w.table.next_deadline()) == ([], None)


def test_a_death_on_the_way_that_it_has_left_costs_no_further_attempt() -> None:
    w = World(trunk=[TRUNK], head_a=[HEAD_A])
    entry = w.admit("a")
    for life in (TRUNK, HEAD_A):
        assert w.die(life) == []
    assert (entry.attempt, w.table.gauges()["rerun"]) == (2, 1)
    assert w.publish(trunk=[5], head_a=[6]) == [SendAgain(entry)]


def test_a_rerun_need_not_wait_for_what_is_lost_itself() -> None:
    w = World(once=["head_b"], trunk=[TRUNK], head_a=[HEAD_A, 3], head_b=[HEAD_B])
    entry = w.admit("a", "b")
    assert w.die(entry.plan.incarnations[entry.plan.ends[0]]) == []  # "b" goes on
    assert w.die(HEAD_B) == [SendAgain(entry)]
    assert w.answer(entry) == done(entry)
    assert (entry.attempt, codes(entry)) == (2, ["WORKER_LOST"])


def test_however_many_workers_a_rerun_has_lost_it_is_charged_once() -> None:
    w = World(budget=1, once=["head_b"], trunk=[TRUNK], head_a=[HEAD_A], head_b=[HEAD_B], mid=[5])
    entry = w.admit("a", "b", "deep")
    assert w.die(5) == []  # "deep"
    assert w.die(HEAD_A) == []  # "a"
    assert len(entry.lost) == 2
    assert w.table.gauges()["budget"] == 1


def test_a_suspect_that_leaves_its_attempt_late_makes_room_for_the_next() -> None:
    """Its worker died before; only now has what it waited for come, and that worker is away."""
    w = World(once=["head_b"], trunk=[TRUNK], head_a=[HEAD_A], head_b=[HEAD_B])
    first, second = two_suspects(w)
    assert w.die(HEAD_A) == []
    assert w.answer(first, end=1) == [SendAgain(second)]
    assert first.waits_for == "a worker of block 'head_a'"


def test_a_suspect_whose_client_is_gone_makes_room_for_the_next() -> None:
    w = World(trunk=[TRUNK], head_a=[HEAD_A], head_b=[HEAD_B])
    first, second = two_suspects(w)
    w.table.attach(b"other", first)
    assert w.table.client_gone(b"other") == [ReleaseInput(first), SendAgain(second)]


def test_an_update_leads_no_rerun_through_a_block_that_may_have_run_for_another_task() -> None:
    w = World(once=["head_b"], trunk=[TRUNK], head_a=[HEAD_A], head_b=[HEAD_B])
    entry = w.admit("a", "b")
    w.die(TRUNK)  # "b" may have begun in head_b and ends; "a" waits for a trunk
    assert w.publish(epoch=2, trunk=[5], head_b=[HEAD_B], paths={**PATHS, "a": PATHS["b"]}) == done(
        entry
    )
    assert codes(entry) == ["WORKER_LOST", "WORKER_LOST"]
    (a, _) = entry.results()
    assert "block 'head_b' must not run twice" in str(a.outcome)


def test_nor_does_the_end_of_a_canary_and_no_update_is_told_of() -> None:
    workers = {"trunk": [TRUNK], "head_b": [HEAD_B], "new": [HEAD_A]}
    w = World(once=["head_b"], **workers)
    assert w.planner.table is not None
    canary = CanaryRoute(("trunk", "new"), 1.0)
    tasks = {t: replace(w.planner.table.tasks["b"], name=t) for t in ("a", "b")}
    tasks["a"] = replace(tasks["a"], canary=canary)
    w.planner.replace(replace(w.planner.table, tasks=tasks))
    entry = w.admit("a", "b")
    w.answer(entry)
    assert w.die(HEAD_A) == done(entry) and codes(entry) == ["WORKER_LOST"]
    assert "block 'head_b' must not run twice" in message(entry)
    assert "update" not in message(entry)
