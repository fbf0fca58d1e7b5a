"""Who may wait for a worker, at the bounds of each rule; and whose rows an update refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from recovery_rig import CONTRACT, World, codes, done, message

from blockflow.core.routing import CanaryRoute, TaskRoute
from blockflow.dispatcher.entry import SendAgain
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.waiting import WaitingRoom
from tests.unit.test_waiting import ask, canaries, publish


def room(*clients: str, charged: int = 1) -> WaitingRoom:
    """Where a request of each of these waits."""
    found = WaitingRoom(Planner())
    for n, client in enumerate(clients):
        entry = SimpleNamespace(client=client.encode(), charged=charged)
        found.waiting[bytes([n])] = entry  # type: ignore[assignment]
    return found


def test_below_half_of_the_places_nobody_is_asked_for_its_share() -> None:
    others = "bcdefgh"  # with a eight clients: two of twenty places each
    assert room("a", "a", *others).refusal(b"a", 1, 40, 1000) == ""
    full = room("a", "a", "b", *others)
    assert full.refusal(b"a", 1, 40, 1000) == "10 requests wait for a worker already"
    assert full.refusal(b"c", 1, 40, 1000) == ""


def test_with_one_credit_one_request_may_wait() -> None:
    assert room().refusal(b"a", 1, 1, 1000) == ""
    assert room("a").refusal(b"a", 1, 1, 1000) == "1 requests wait for a worker already"


def test_half_of_the_memory_may_be_waited_in() -> None:
    assert room("a", "b", charged=10).refusal(b"c", 30, 100, 100) == ""
    assert "memory" in room("a", "b", charged=10).refusal(b"c", 31, 100, 100)


def test_what_is_larger_than_an_update_allows_ends() -> None:
    """Its rows were counted when it came, by what held then."""
    workers = {"trunk": [5], "head_a": [2]}
    for was, code in (([1], "WORKER_LOST"), ([], "BLOCK_UNAVAILABLE")):
        w = World(trunk=was, head_a=[2])
        entry = w.admit("a", rows=3)
        for incarnation in was:
            assert w.die(incarnation) == []
        assert w.publish(epoch=2, max_rows=2, **workers) == done(entry)
        assert codes(entry) == [code]
    w = World(head_a=[2])
    entry = w.admit("a", rows=3)
    assert w.publish(epoch=2, max_rows=3, **workers) == [SendAgain(entry)]


def given_up(planner: Planner, *down: str) -> None:
    """Workers for "a", and for what of "b" and "c" has not been given up."""
    publish(planner, *[block for block in "abc" if block not in down])
    assert planner.table is not None
    planner.replace(replace(planner.table, down=dict.fromkeys(down, "it was given up")))


def test_whose_turn_was_the_canarys_goes_there_though_its_tasks_own_way_is_no_more() -> None:
    for down in ("b", "bc"):
        planner, table = canaries("b", "c")
        entries = ask(planner, table, 20)
        turns = [e for e in entries if e.plan.turns]
        assert 8 <= len(turns) <= 12
        given_up(planner, *down)
        table.published()
        if down == "b":
            assert {e.plan.blocks for e in turns} == {("a", "c")}
        ended = [e for e in entries if e not in table]
        assert ended == [e for e in entries if down == "bc" or e not in turns]
        assert {c for e in ended for c in codes(e)} == {"BLOCK_UNAVAILABLE"}


def test_whose_turn_was_not_the_canarys_ends_and_the_requests_other_task_goes_on() -> None:
    planner, table = canaries("b", "c")

    def published(**down: str) -> None:
        """As it is, with a task that is "a" alone."""
        routes = planner.table
        assert routes is not None
        tasks = {**routes.tasks, "u": TaskRoute("u", ("a",), CONTRACT)}
        planner.replace(replace(routes, tasks=tasks, down=down))
        table.published()

    published()
    given: dict[str, Any] = {"rows": 1, "deadline_ns": 9, "received_ns": 0}
    given |= {"retained": None, "charged": 1, "tasks": ("t", "u")}
    tasks = [planner.task(name) for name in "tu"]
    entries = [
        table.admit(b"c", n.to_bytes(16, "big"), plan=planner.way(tasks), **given)
        for n in range(20)
    ]
    turns = [bool(e.plan.turns) for e in entries]
    assert {*turns} == {True, False}
    publish(planner, "a", "c")
    published(b="it was given up")
    assert [e.plan.blocks for e in entries] == [("a", "c") if t else ("a",) for t in turns]
    assert [e.open for e in entries] == [("t", "u") if t else ("u",) for t in turns]


def test_a_canary_that_does_not_go_with_the_other_task_ends_it_not() -> None:
    """Its own task has no way any more: neither its own nor, beside the other one, the canary's."""
    canary = CanaryRoute(("c",), 1.0)
    t, u = TaskRoute("t", ("a", "b"), CONTRACT, canary=canary), TaskRoute("u", ("a",), CONTRACT)
    planner, table = canaries("b", "c")

    def published(*blocks: str, **down: str) -> None:
        publish(planner, *blocks)
        assert planner.table is not None
        planner.replace(replace(planner.table, tasks={"t": t, "u": u}, down=down))
        table.published()

    published("b", "c")
    given: dict[str, Any] = {"rows": 1, "deadline_ns": 9, "received_ns": 0}
    given |= {"retained": None, "charged": 1, "tasks": ("t", "u"), "plan": planner.way([t, u])}
    entry = table.admit(b"c", b"1" * 16, **given)
    assert entry.waits_for and entry.plan.turns == {"t"}
    published("a", "c", b="it was given up")
    assert (entry.open, entry.plan.blocks) == (("u",), ("a",))


def test_what_may_have_been_done_is_refused_when_its_way_is_known() -> None:
    w = World(once=["trunk"], head_a=[2])
    plan = w.planner.way([w.planner.task("a")])
    given: dict[str, Any] = {"rows": 1, "deadline_ns": 9, "received_ns": 0}
    given |= {"retained": None, "charged": 1}
    new = w.table.admit(b"c", b"1" * 16, ("a",), plan, **given)
    again = w.table.admit(b"c", b"2" * 16, ("a",), plan, again=True, **given)
    assert w.publish(trunk=[5], head_a=[2]) == [SendAgain(new), *done(again)]
    assert codes(again) == ["WORKER_LOST"] and "must not run twice" in message(again)
