"""A scheduler tells its policies all that they decide by, and carries out all that they say."""

from __future__ import annotations

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import WaitUntil
from blockflow.batching.shares import TaskShare
from blockflow.core.routing import merge_paths
from blockflow.wire.data import REQUEST_ID_BYTES, Item
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch, Source, Ticket

MS = 1_000_000
WINDOW = {"policy": "window", "max_rows": 8, "max_delay_ms": 10}
PATHS = ((1, 2, 4, 5), (1, 3, 6))
OTHER = {"policy": "window", "max_rows": 8, "max_delay_ms": 4}


def ticket(
    key: int, stage: int, *, paths: tuple[tuple[int, ...], ...] = ((1,), (2,)), length: int = 4
) -> Ticket:
    """At ``stage``, on its way through ``paths``."""
    tree, _ = merge_paths([p for p in paths if stage in p])
    hop = next(i for i, node in enumerate(tree.nodes) if node.stage == stage)
    item = Item(bytes(REQUEST_ID_BYTES), 1, 1, tree, hop, 1, 1000)
    source = Source("float32", (length,), 1)
    return Ticket(key, item, stage, source, 0, 0, 0, 0, 1000 * MS, 0)


def test_a_policy_knows_the_whole_way_and_only_its_own_stages() -> None:
    s = Scheduler({1: WINDOW, 2: WINDOW, 3: OTHER, 4: WINDOW, 5: WINDOW, 6: WINDOW})
    for key, stage in enumerate((1, 4, 2)):
        s.arrive(ticket(key, stage, paths=PATHS), 0)
    ahead = {q.key: q.ahead for policy in s._policies for q in policy.waiting()}
    assert ahead == {0: (2, 4, 5), 1: (5,), 2: (4, 5)}


def test_of_several_policies_the_soonest_counts() -> None:
    for first, second in ((WINDOW, OTHER), (OTHER, WINDOW)):
        s = Scheduler({1: first, 2: second})
        for key, stage in enumerate((1, 2)):
            s.arrive(ticket(key, stage), 0)
        assert s.decide(0) == WaitUntil(4 * MS)


def test_a_window_begins_when_its_query_begins_to_wait_at_the_stage() -> None:
    s = Scheduler({1: WINDOW})
    late = ticket(0, 1)
    late.ready_ns = 5 * MS
    s.arrive(late, 5 * MS)
    assert s.decide(5 * MS) == WaitUntil(15 * MS)


def test_new_shares_lose_nobody_who_waits() -> None:
    s = Scheduler({1: WINDOW})
    s.arrive(ticket(0, 1), 0)
    s.set_shares([TaskShare(weight=2.0)], MS)
    batch = s.decide(10 * MS)
    assert isinstance(batch, Batch) and [t.key for t in batch.tickets] == [0]


def test_a_batch_is_padded_as_its_policy_says() -> None:
    facts = {1: StageFacts("enc", 8, 1, None, (0,), (1, 64), pads=True)}
    s = Scheduler({1: {**WINDOW, "max_delay_ms": 0, "classes": [8]}}, facts)
    for key, length in enumerate((5, 7)):
        s.arrive(ticket(key, 1, length=length), 0)
    batch = s.decide(0)
    assert isinstance(batch, Batch) and batch.pad_to == (7,)


def test_a_policy_knows_how_many_lanes_are_in_use() -> None:
    """Whether another lane takes somebody at once decides about joins; of a stage that another
    policy runs, several batches may be under way."""
    s = Scheduler({1: {"policy": "none"}, 2: WINDOW}, lanes=3, widths=lambda _: 2)
    for key in range(2):
        s.arrive(ticket(key, 1, paths=((1, 2),)), 0)
        assert isinstance(s.decide(0), Batch)
    seen: list[list[int]] = []
    other = s._by_stage[2]
    other.SIDE_BY_SIDE = False  # type: ignore[misc]
    other.decide = lambda now, busy=(): seen.append(list(busy))  # type: ignore[method-assign, func-returns-value]
    assert s.decide(0) is None and seen == [[1, 1]]
