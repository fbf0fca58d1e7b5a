"""Scheduler and parting of outputs: pure, so every decision is asserted on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockflow.batching.facts import StageFacts
from blockflow.batching.policy import Run
from blockflow.batching.queueing import QueueingPolicy
from blockflow.batching.sliced import SlicedPolicy
from blockflow.core import limits
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.profile import Point, StageProfile
from blockflow.core.routing import merge_paths
from blockflow.tensormq.channel import Payload
from blockflow.wire.data import Data, HopTiming, encode_data
from blockflow.wire.tensor import Handle, TensorDesc
from blockflow.worker.parting import next_item, plan_parts, spent
from blockflow.worker.scheduler import PolicyDefect, Scheduler
from blockflow.worker.ticket import Batch
from tests.scheduler_rig import MS, ticket


def drain(scheduler: Scheduler, now: int) -> list[list[int]]:
    batches = []
    while isinstance(batch := scheduler.decide(now), Batch):
        batches.append([t.key for t in batch.tickets])
        scheduler.done(batch, now)
    return batches


# --- scheduler -----------------------------------------------------------------------------------


def test_counts_by_stage() -> None:
    s = Scheduler({1: {"policy": "none"}, 2: {"policy": "none"}})
    s.arrive(ticket(1, rows=3), 0)
    s.arrive(ticket(2, [[2]], rows=4), 0)
    s.arrive(ticket(3, [[2]], rows=5), 0)
    assert (len(s), s.queued(1), s.queued(2)) == (3, 1, 2)
    assert (s.queued_rows(1), s.queued_rows(2), s.all_rows) == (3, 9, 12)
    assert drain(s, 0) == [[1], [2], [3]]
    assert (len(s), s.all_rows, s.next_deadline()) == (0, 0, None)


def test_expired_ones_are_taken_away_once() -> None:
    s = Scheduler({1: {}})
    for key, deadline in ((1, 30), (2, 10), (3, 20)):
        s.arrive(ticket(key, deadline=deadline), 0)
    assert s.next_deadline() == 10
    assert [t.key for t in s.expire(9)] == []
    assert [t.key for t in s.expire(20)] == [2, 3]
    assert [t.key for t in s.expire(20)] == []
    assert drain(s, 21) == [[1]]
    assert s.expire(10**12) == []


def test_a_key_that_waits_again_keeps_its_deadline() -> None:
    s = Scheduler({1: {}, 2: {}})
    s.arrive(ticket(1, [[1, 2]], deadline=50), 0)
    assert drain(s, 1) == [[1]]
    s.arrive(ticket(1, [[1, 2]], hop=1, deadline=50), 2)
    assert [t.stage for t in s.expire(50)] == [2]
    assert s.expire(60) == []


def test_what_has_run_keeps_no_place_until_its_deadline() -> None:
    """With thousands of them, whoever asked for the next one took a tenth of a second at once."""
    s = Scheduler({1: {}, 2: {}})
    for key in range(3):
        s.arrive(ticket(key, [[1]], deadline=10**6 + key), 0)
    for key in range(3, 2000):
        s.arrive(ticket(key, [[2]], deadline=10**9), key)
        s.withdraw([s._tickets[key].item], key)
    assert len(s) == 3 and len(s._deadlines) < 400
    assert s.next_deadline() == 10**6
    assert [t.key for t in s.expire(10**6 + 1)] == [0, 1] and s.next_deadline() == 10**6 + 2


def test_policy_can_change_while_queries_wait() -> None:
    s = Scheduler({1: {"policy": "none"}, 2: {"policy": "none"}})
    for key in (1, 2, 3):
        s.arrive(ticket(key, now=key), key)
    running = s.decide(4)
    assert isinstance(running, Batch)
    s.set_policy(1, {"policy": "none"}, 5)
    s.done(running, 6)
    assert drain(s, 7) == [[2], [3]]
    s.arrive(ticket(9), 8)
    with pytest.raises(TopologyError):
        s.set_policy(1, {"policy": "nope"}, 9)
    assert drain(s, 10) == [[9]]


@pytest.mark.parametrize("steps", [[(1, 1), (2, 1), (1, 2)], [(2, 1), (1, 1)]], ids=["new", "back"])
def test_who_comes_from_another_policys_stage_takes_his_turn(steps: list[tuple[int, int]]) -> None:
    """He was in no batch that this policy has just run, though one has ended and it was not asked
    since; or he was, and has been elsewhere in the meantime."""
    window = {"policy": "window", "max_rows": 1}
    s = Scheduler({1: {"policy": "none"}, 2: window, 3: window})
    way = [1, 2] if steps[0] == (1, 1) else [2, 1, 3]
    for key in {key for _, key in steps}:
        s.arrive(ticket(key, [way]), 0)
    for now, (stage, key) in enumerate(steps, start=1):
        batch = s.decide(now)
        assert isinstance(batch, Batch)
        assert (batch.stage, [t.key for t in batch.tickets]) == (stage, [key])
        if now == 2:  # one more waits, in more of a hurry
            s.arrive(ticket(10, [way[-1:]], now=now, deadline=500 * MS), now)
        s.done(batch, now)
        if stage != way[-1]:
            going = ticket(key, [way], hop=way.index(stage) + 1, now=now)
            s.arrive(replace(going, arrival_ns=0), now)
    batch = s.decide(9)
    assert isinstance(batch, Batch) and [t.key for t in batch.tickets] == [10]


def test_a_stage_is_busy_until_its_batch_is_done() -> None:
    s = Scheduler({1: {}, 2: {"policy": "window"}})
    for key, stage in ((1, 1), (2, 1), (3, 2), (4, 2)):
        s.arrive(ticket(key, [[stage]]), 0)
    first = s.decide(0)
    second = s.decide(0)
    assert isinstance(first, Batch) and isinstance(second, Batch)
    assert (first.stage, second.stage) == (1, 2) and s.busy == {1, 2}
    assert s.decide(0) is None
    # Whoever's batch it is: a new policy hears of it, too.
    s.set_policy(1, {"policy": "window"}, 0)
    assert s.decide(0) is None
    s.done(second, 1)
    assert s.busy == {1} and s.decide(1) is None
    s.done(first, 2)
    assert drain(s, 3) == [[2]]


def test_a_policy_that_runs_a_busy_stage_is_stopped() -> None:
    s = Scheduler({1: {}})
    for key in (1, 2):
        s.arrive(ticket(key), 0)
    assert isinstance(s.decide(0), Batch)
    s._policies[0].decide = lambda *_: Run(1, (2,))  # type: ignore[method-assign]
    with pytest.raises(PolicyDefect, match="another batch at stage 1, which is busy"):
        s.decide(0)


def facts(*threads: int) -> StageFacts:
    """A stage of one thread, measured with these."""
    points = tuple(
        Point(n, b, None, 30, t, t, t, t, t, t, 0.01, 0)
        for n in threads
        for b, t in ((1, 10.0 / n), (2, 12.0 / n), (4, 16.0 / n), (8, 24.0 / n))
    )
    return StageFacts("b", 8, 1, StageProfile("b", "0" * 64, "echo", "fp32", "test", points))


def test_policies_predict_from_the_facts_that_they_were_given() -> None:
    """Two rows take 12 ms on one thread and 6 on two; of ten the bound lets only the latter."""
    policy = {"policy": "lbci", "t_opt_ms": 11}
    s = Scheduler({1: policy}, {1: facts(1, 2)})

    def on(threads: int) -> StageFacts:
        return replace(facts(1, 2), threads=threads)

    for key in range(4):
        s.arrive(ticket(key), 0)
    s.set_policy(1, policy, 1, on(2))
    assert drain(s, 2) == [[0, 1, 2, 3]]
    for key in range(4, 6):
        s.arrive(ticket(key), 3)
    s.set_policy(1, policy, 4, on(1))
    assert drain(s, 5) == [[4], [5]]
    with pytest.raises(TopologyError, match=r"invalid"):
        s.set_policy(1, policy, 6, on(3))
    assert s.facts[1] == on(1) and s.policy(1) == policy
    before = s._by_stage[1]
    s.set_policy(1, dict(policy), 6, on(1))
    assert s._by_stage[1] is before  # nothing is new: what it has learned stays
    s.arrive(ticket(6), 7)
    assert drain(s, 8) == [[6]]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_classes_change_block_by_block_beside_a_block_of_fixed_dims(order: tuple[int, int]) -> None:
    """Half-way the fixed one has the old classes for itself, or the new ones; both are allowed to
    the two together."""
    padded = StageFacts("e", 8, 1, length_dims=(0,), lengths=(1, 32), pads=True)
    old = {"policy": "window", "classes": [8, 16]}
    s = Scheduler({1: old, 2: old}, {1: padded, 2: StageFacts("h", 8, 1)})
    for policy in ({**old, "classes": [8, 32]}, {"policy": "none"}, old):
        for stage in order:
            s.set_policy(stage, policy, 0)
        assert s.policy(1) == s.policy(2) == policy
        assert s._by_stage[1] is s._by_stage[2]


def test_who_comes_from_another_policys_block_counts_as_arrived() -> None:
    """What joining is worth depends on who comes after; where they come from does not matter."""
    s = Scheduler({1: {"policy": "none"}, 2: WINDOW, 3: WINDOW})
    window = s._by_stage[2]
    assert isinstance(window, QueueingPolicy)

    def arrive(key: int, hop: int, now: int) -> None:
        came = ticket(key, ((1, 2, 3),), hop=hop, now=now)
        came.arrival_ns = 0  # into the worker, by its first block
        s.arrive(came, now)

    for key in range(1, 9):
        arrive(key, 1, key * MS)
    assert window._arrivals.rate(9 * MS) > 0
    before = window._arrivals.rate(100 * MS)
    arrive(9, 2, 99 * MS)  # it was counted at stage 2
    assert window._arrivals.rate(100 * MS) == before


def test_policies_know_the_lanes_of_this_moment() -> None:
    sliced = {"policy": "dvabatch", "stages": [2]}
    s = Scheduler({1: WINDOW, 2: sliced, 3: sliced}, lanes=3)
    for lanes in (3, 1, 2):
        s.lanes = lanes
        s.arrive(ticket(lanes), 0)
        assert drain(s, 0) == [[lanes]]
        window, outer = s._policies
        assert isinstance(outer, SlicedPolicy)
        assert window.lanes == outer.lanes == outer._policy.lanes == lanes


def test_who_is_told_what_it_was_born_with_forgets_nothing() -> None:
    """A launch brings the whole profile, a SetPolicy (that of a new Manager, say) the points for
    its threads."""
    tensor = TensorSpec("float32", ("rows", 4))
    info = BlockInfo("b", "1", "0" * 64, "pt2", Contract(tensor, tensor), 1, 4)
    table = facts(1, 2).profile
    assert table is not None
    policy = {"policy": "lbci", "t_opt_ms": 11}
    born = StageFacts.of(StageSpec(1, info, profile=table.to_dict()), 2)
    s = Scheduler({1: policy}, {1: born})
    before = s._by_stage[1]
    s.set_policy(1, policy, 1, replace(s.facts[1], threads=2, profile=table.only(2)))
    assert s._by_stage[1] is before


def test_take_all() -> None:
    s = Scheduler({1: {}})
    for key in (1, 2):
        s.arrive(ticket(key), 0)
    assert [t.key for t in s.take_all()] == [1, 2]
    assert s.decide(0) is None and len(s) == 0 and s.all_rows == 0


WINDOW = {"policy": "window", "max_rows": 8, "max_delay_ms": 0}


def test_what_is_to_run_alone_is_not_batched() -> None:
    s = Scheduler({1: WINDOW})
    for key in range(1, 7):
        s.arrive(ticket(key, alone=key in (2, 5)), 0)
    assert (s.queued(1), s.all_rows) == (6, 6)
    assert drain(s, 0) == [[2], [5], [1, 3, 4, 6]]
    assert len(s) == 0


def test_one_that_runs_alone_has_its_stage_for_itself() -> None:
    s = Scheduler({1: WINDOW, 2: {"policy": "none"}})
    s.arrive(ticket(1, alone=True), 0)
    s.arrive(ticket(2), 0)
    s.arrive(ticket(3, [[2]]), 0)
    lone = s.decide(0)
    assert isinstance(lone, Batch)
    assert lone.alone
    other = s.decide(0)
    assert isinstance(other, Batch)
    assert (other.stage, other.alone) == (2, False)
    assert not isinstance(s.decide(0), Batch)
    s.done(lone, 1)
    assert drain(s, 1) == [[2]]


def test_what_runs_alone_expires_and_changes_hands_like_the_others() -> None:
    s = Scheduler({1: WINDOW})
    s.arrive(ticket(1, alone=True, deadline=10), 0)
    s.arrive(ticket(2, alone=True), 0)
    s.arrive(ticket(3), 0)
    assert [t.key for t in s.expire(10)] == [1]
    s.set_policy(1, {"policy": "none"}, 11)
    assert drain(s, 12) == [[2], [3]]
    s.arrive(ticket(4, alone=True), 13)
    assert [t.key for t in s.take_all()] == [4]
    assert s.decide(14) is None


# --- parting a batch by next hop -----------------------------------------------------------------


def shape(parts: Any) -> list[tuple[int, int, int, list[tuple[int, int]]]]:
    return [(p.stage, p.start, p.stop, [(t.key, hop) for t, hop in p.members]) for p in parts]


def test_rows_with_the_same_way_are_one_message() -> None:
    batch = Batch(1, (ticket(1, [[1, 2]], rows=2), ticket(2, [[1, 2]], rows=3)))
    parts, stays = plan_parts(batch, {1})
    assert shape(parts) == [(2, 0, 5, [(1, 1), (2, 1)])] and stays == []


def test_parted_by_next_hop() -> None:
    batch = Batch(
        1,
        (
            ticket(1, [[1, 2]], rows=1),
            ticket(2, [[1, 3], [1]], rows=2),  # goes to 3 and is an answer
            ticket(3, [[1, 2]], rows=1),  # same way as the first, but not beside it
            ticket(4, [[1, 4]], rows=1),  # stays in this worker
        ),
    )
    parts, stays = plan_parts(batch, {1, 4})
    assert shape(parts) == [
        (2, 0, 1, [(1, 1)]),
        (3, 1, 3, [(2, 1)]),
        (0, 1, 3, [(2, 0)]),
        (2, 3, 4, [(3, 1)]),
    ]
    assert [(t.key, hop, start) for t, hop, start in stays] == [(4, 1, 4)]


def test_the_scheduler_puts_equal_ways_side_by_side() -> None:
    s = Scheduler({1: {}})
    tickets = [ticket(k, [[1, 2 + k % 2]]) for k in range(4)]
    for t in tickets:
        s.arrive(t, 0)
    batch = s._take(Run(1, (0, 1, 2, 3)))
    parts, _ = plan_parts(batch, {1})
    assert [(p.stage, len(p.members)) for p in parts] == [(2, 2), (3, 2)]


def test_failed_ones_are_left_out() -> None:
    batch = Batch(1, tuple(ticket(k, [[1, 2]], rows=2) for k in (1, 2, 3)))
    batch.errors[2] = RequestError("CANCELLED", "")
    parts, _ = plan_parts(batch, {1})
    assert shape(parts) == [(2, 0, 2, [(1, 1)]), (2, 4, 6, [(3, 1)])]


def test_two_branches_to_one_stage_are_two_messages() -> None:
    tree = merge_paths([[1, 2, 4], [1, 3, 4]])[0]
    one = ticket(1, [[1, 2, 4], [1, 3, 4]])
    assert tree.children(0) == (1, 3)
    batch = Batch(1, (one,))
    parts, _ = plan_parts(batch, {1})
    assert shape(parts) == [(2, 0, 1, [(1, 1)]), (3, 0, 1, [(1, 3)])]


def test_a_message_is_of_one_shape() -> None:
    batch = Batch(1, tuple(ticket(k, [[1, 2]]) for k in range(4)))
    batch.cuts = {2: (7,), 3: (7,)}
    parts, _ = plan_parts(batch, {1})
    assert [(len(p.members), p.shape) for p in parts] == [(2, None), (2, (7,))]


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=100),
    length=st.integers(1, 30),
    hops=st.integers(0, 29),
)
def test_headers_stay_within_the_limit(rows: list[int], length: int, hops: int) -> None:
    """However many items and hops: every message can be encoded, and every row leaves once."""
    path = list(range(2**40, 2**40 + length))
    tickets = tuple(
        ticket(k, [path], rows=n, timings=min(hops, length - 1)) for k, n in enumerate(rows)
    )
    batch = Batch(1, tickets)
    batch.started_ns, batch.compute_from_ns, batch.compute_to_ns = 2**62, 2**62, 2**62 + 2**61
    parts, _ = plan_parts(batch, {2**40})
    covered = []
    for p in parts:
        desc = TensorDesc("float32", (sum(rows), 4), Handle(2**63, 2**31, 255, 2**31, 2**62))
        desc = Payload(desc, None).rows(p.start, p.stop).desc
        items = tuple(next_item(t, batch, hop, 2**62 + 2**61) for t, hop in p.members)
        header = encode_data(Data(2**63, 2**63, desc, items))
        assert len(header) <= limits.MAX_HEADER_BYTES
        assert len(items) <= limits.MAX_ITEMS_PER_MESSAGE
        covered += range(p.start, p.stop)
    assert covered == list(range(sum(rows)))


def test_time_adds_up() -> None:
    one = ticket(1, now=1000)
    one.received_ns, one.ready_ns = 1000, 1010
    batch = Batch(1, (one,), started_ns=1500, compute_from_ns=1530, compute_to_ns=2530)
    parts = spent(one, batch, 2600)
    assert parts == (490, 10 + 30 + 70, 1000) and sum(parts) == 2600 - one.received_ns
    item = next_item(one, batch, 0, 2600)
    assert item.hops == (HopTiming(0, 5, *parts),) and item.remaining_ms == (1000 * MS - 2600) // MS
