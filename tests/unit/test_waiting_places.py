"""Who may wait for a worker, at the bounds of each rule; and whose rows an update refuses."""

from __future__ import annotations

from types import SimpleNamespace

from recovery_rig import World, codes, done

from blockflow.dispatcher.entry import SendAgain
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.waiting import WaitingRoom


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
