"""What admission learns from a request that has ended."""

from __future__ import annotations

from typing import Any

import pytest
from recovery_rig import SECOND, World

from blockflow.core.errors import BlockError, RequestError
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.entry import Answer, Entry
from blockflow.dispatcher.feedback import learn
from blockflow.wire.data import HopTiming


class Told(Admission):
    """Writes down what it is told: task, time queued and time worked on, or None for a deadline."""

    def __init__(self) -> None:
        super().__init__(8, 8, 1 << 20)
        self.told: list[tuple[Any, ...]] = []

    def answered(self, key: Any, task: str, queued_ns: int, worked_ns: int, now_ns: int) -> None:
        self.told.append((task, queued_ns, worked_ns))

    def expired(self, key: Any, task: str, now_ns: int) -> None:
        self.told.append((task, None))


def learnt(entry: Entry) -> list[tuple[Any, ...]]:
    admission = Told()
    learn(admission, entry, entry.results(), SECOND)
    return admission.told


def test_each_task_by_the_blocks_on_its_own_way() -> None:
    w = World(trunk=[1], head_a=[2], head_b=[3])
    entry = w.admit("a", "b")
    # Node, transit, wait, overhead, compute; what a reply says of nodes beside its way is nothing.
    hops = [HopTiming(n, n + 1, 10 * (n + 1), 100 * (n + 1), 1000 * (n + 1)) for n in range(3)]
    for node in entry.plan.ends:
        sender = entry.plan.incarnations[node]
        w.table.outcome(entry.ticket, 1, node, sender, Answer("", tuple(hops), 0))
    assert learnt(entry) == [("a", 11 + 22, 1100 + 2200), ("b", 11 + 33, 1100 + 3300)]
    entry = w.admit("a", "b")
    odd = BlockError("BLOCK_FAILED", "of one of them")
    for node, outcome in zip(entry.plan.ends, (odd, Answer("", tuple(hops), 0)), strict=True):
        w.table.outcome(entry.ticket, 1, node, entry.plan.incarnations[node], outcome)
    assert learnt(entry) == [("b", 11 + 33, 1100 + 3300)]


@pytest.mark.parametrize(
    ("code", "told"), [("DEADLINE_EXCEEDED", [("a", None)]), ("CANCELLED", []), ("WORKER_LOST", [])]
)
def test_of_failures_only_a_deadline_that_has_passed(code: str, told: list[Any]) -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    w.table.fail(entry, RequestError(code, "planted"))
    assert learnt(entry) == told


def test_nothing_of_what_was_run_again() -> None:
    w = World(trunk=[1, 2], head_a=[3])
    entry = w.admit("a")
    w.die(entry.plan.incarnations[0])
    w.answer(entry)
    assert entry.attempt == 2
    assert learnt(entry) == []
