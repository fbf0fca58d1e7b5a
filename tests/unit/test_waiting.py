"""New requests wait for a worker that is being replaced, within bounds; further attempts count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from recovery_rig import CONTRACT, PATHS, SECOND, World, codes, done, message

from blockflow.core.errors import RequestError
from blockflow.core.routing import CanaryRoute, RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.admission import Admission
from blockflow.dispatcher.entrance import let_in
from blockflow.dispatcher.entry import EDGE, Answer, Entry, ReleaseInput, SendAgain
from blockflow.dispatcher.feedback import learn
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.plan import Plan, Planner
from blockflow.dispatcher.recovery import Death
from blockflow.dispatcher.retry import RetryBudget
from blockflow.wire.client import Request
from blockflow.wire.tensor import TensorDesc

MS = 1_000_000


def parked(*tasks: str, deadline_ns: int = 10 * SECOND) -> tuple[World, Entry]:
    """A request that came while "trunk" had no worker."""
    w = World(head_a=[2], head_b=[3])
    entry = w.admit(*(tasks or ("a",)), deadline_ns=deadline_ns)
    assert entry.waits_for == "a worker of block 'trunk'"
    assert w.left() == (1, 1, 8)
    assert w.table.oldest_version() is None  # it holds no old version back
    return w, entry


def test_it_sets_out_as_its_first_attempt_when_the_routes_come() -> None:
    w, entry = parked()
    assert w.publish(head_a=[2]) == []
    assert w.publish(trunk=[5], head_a=[2]) == [SendAgain(entry)]
    assert (entry.attempt, entry.waits_for, entry.item(0).alone) == (1, "", False)
    assert entry.plan.incarnations == (5, 2)
    assert w.superseded == []
    assert w.answer(entry) == done(entry)
    assert entry.results()[0].outcome == Answer(1, (), 0)
    gauges = w.table.gauges()
    assert [gauges[k] for k in ("parked_new", "parked", "rerun", "waiting")] == [1, 0, 0, 0]
    assert w.left() == (0, 0, 0)


def test_all_set_out_in_the_order_in_which_they_came_and_may_be_run_again() -> None:
    w, first = parked()
    second = w.admit("a")
    assert w.publish(trunk=[5], head_a=[2]) == [SendAgain(first), SendAgain(second)]
    assert w.die(5) == []
    assert first.attempt == second.attempt == 2
    assert w.publish(trunk=[6], head_a=[2]) == [SendAgain(first), SendAgain(second)]
    assert [s.ticket for s in w.superseded] == [first.ticket, second.ticket]


def test_several_tasks_on_one_input_wait_for_the_last_of_their_blocks() -> None:
    w, entry = parked("a", "b", "t")
    assert w.publish(trunk=[5], head_a=[2]) == []
    assert entry.waits_for == "a worker of block 'head_b'"
    assert w.publish(trunk=[5], head_a=[2], head_b=[6]) == [SendAgain(entry)]
    assert [w.answer(entry, end) for end in range(3)] == [[], [], done(entry)]


def test_tasks_that_do_not_go_together_are_told_at_once() -> None:
    w = World(head_a=[2])
    w.publish(head_a=[2], paths={"a": ("trunk",), "b": ("head_a",)})
    with pytest.raises(RequestError, match="one input"):
        w.admit("a", "b")


def test_a_block_that_will_not_come_back_ends_it_at_once() -> None:
    w, entry = parked()
    assert w.publish(head_a=[2], down={"trunk": "an operator closed it (drained)"}) == done(entry)
    assert codes(entry) == ["BLOCK_UNAVAILABLE"]
    assert "operator" in message(entry)
    with pytest.raises(RequestError) as e:
        w.admit("a")
    assert (e.value.code, e.value.where) == ("BLOCK_UNAVAILABLE", "trunk")


def test_of_two_absent_blocks_the_one_that_will_not_come_back_decides() -> None:
    w, entry = parked()
    assert w.publish(head_b=[3], down={"head_a": "it was given up"}) == done(entry)
    with pytest.raises(RequestError) as e:
        w.admit("a")
    assert e.value.where == "head_a"


def test_its_deadline_says_what_it_waited_for() -> None:
    w, entry = parked(deadline_ns=SECOND)
    assert w.table.next_deadline() == SECOND
    assert w.table.tick(SECOND) == done(entry)
    assert codes(entry) == ["DEADLINE_EXCEEDED"]
    assert "waited for a worker of block 'trunk'" in message(entry)
    assert "died" not in message(entry)


def test_an_update_may_change_what_it_asked_for() -> None:
    for paths in ({"t": ("trunk",)}, {"a": ("head_a", "trunk"), "b": ("trunk",)}):
        w, entry = parked("a", "b")
        assert w.publish(epoch=2, trunk=[5], head_a=[6], paths=paths) == done(entry)
        assert set(codes(entry)) == {"BLOCK_UNAVAILABLE"}
    w, entry = parked()
    assert w.publish(epoch=2, trunk=[5], head_a=[6]) == [SendAgain(entry)]
    assert entry.item(0).epoch == 2


def test_what_an_update_has_changed_or_nobody_runs_ends_alone() -> None:
    """The other tasks of the request were promised an answer of their own."""
    w, entry = parked("a", "b", "t")
    down = {"head_b": "it was given up"}
    assert w.publish(epoch=2, head_a=[6], paths={"b": PATHS["b"], "t": PATHS["t"]}) == []
    assert entry.open == ("b", "t")
    assert w.publish(epoch=2, trunk=[5], head_a=[6], down=down) == [SendAgain(entry)]
    assert entry.plan.blocks == ("trunk",)
    assert w.answer(entry) == done(entry)
    assert [e.task for e in entry.results()] == ["a", "b", "t"]
    assert codes(entry) == ["BLOCK_UNAVAILABLE"] * 2 and w.left() == (0, 0, 0)


def test_a_further_attempt_goes_on_without_what_an_update_has_changed() -> None:
    w = World(trunk=[1], head_a=[2], head_b=[3])
    entry = w.admit("a", "b")
    w.publish(epoch=2, trunk=[1, 5], head_a=[2], head_b=[3], paths={"b": PATHS["b"]})
    assert w.die(1) == [SendAgain(entry)]
    assert (entry.attempt, w.answer(entry)) == (2, done(entry))
    assert codes(entry) == ["WORKER_LOST"]


def test_cancel_client_gone_and_the_end_reach_it() -> None:
    for end in ("cancel", "client_gone", "abort_all"):
        w, entry = parked()
        if end == "cancel":
            assert w.table.cancel(b"client", entry.request_id) == done(entry)
            assert codes(entry) == ["CANCELLED"]
        elif end == "client_gone":
            assert w.table.client_gone(b"client") == [ReleaseInput(entry)]
        else:
            assert w.table.abort_all(RequestError("NOT_READY", "over")) == done(entry)
        assert w.left() == (0, 0, 0)
        assert w.publish(trunk=[5], head_a=[2]) == []


# --- canaries


def canaries(*blocks: str) -> tuple[Planner, InFlightTable]:
    """Half of the requests of "t" go (a, c) in the place of (a, b); workers for these blocks."""
    planner = Planner()
    publish(planner, *blocks)
    return planner, InFlightTable(7, planner, RetryBudget(10))


def publish(planner: Planner, *blocks: str) -> None:
    stages = {
        n: StageRoute(n, block, f"{block}#0", 10 + n, f"ipc://{n}", "tensormq")
        for n, block in enumerate(blocks, 1)
    }
    task = TaskRoute("t", ("a", "b"), CONTRACT, canary=CanaryRoute(("a", "c"), 0.5))
    planner.replace(RouteTable(1, planner.version + 1, stages, {"t": task}))


def ask(planner: Planner, table: InFlightTable, count: int) -> list[Entry]:
    given: dict[str, Any] = {"rows": 1, "deadline_ns": 9, "received_ns": 0}
    given |= {"retained": None, "charged": 1}
    return [
        table.admit(b"c", n.to_bytes(16, "big"), ("t",), planner.way([planner.task("t")]), **given)
        for n in range(count)
    ]


def test_a_canary_keeps_its_share_of_what_waited() -> None:
    there, _ = canaries("a", "b", "c")
    whole = [bool(there.way([there.task("t")]).canaries) for _ in range(20)]
    planner, table = canaries("b", "c")  # what both ways have in common is away
    entries = ask(planner, table, 20)
    assert all(e.waits_for and not e.plan.canaries for e in entries)
    publish(planner, "a", "b", "c")
    table.published()
    assert [bool(e.plan.canaries) for e in entries] == whole


def test_only_what_would_go_the_way_of_the_absent_block_waits() -> None:
    planner, table = canaries("a", "c")
    entries = ask(planner, table, 20)
    assert {e.plan.blocks for e in entries if not e.waits_for} == {("a", "c")}
    waiting = [e for e in entries if e.waits_for]
    assert 8 <= len(waiting) <= 12
    publish(planner, "a", "b", "c")
    table.published()
    assert {e.plan.blocks for e in waiting} == {("a", "b")}


def test_a_canary_that_is_away_gives_way() -> None:
    planner, table = canaries("a", "b")
    assert {e.plan.blocks for e in ask(planner, table, 20)} == {("a", "b")}


# --- who may wait


def enter(
    w: World, admission: Admission, client: bytes, task: str, rid: int, rows: int = 1
) -> Entry:
    """As Exchange does it."""
    desc = TensorDesc("float32", (rows, 4))
    request = Request(rid.to_bytes(16, "big"), (task,), 1000, desc)
    tasks = [w.planner.task(task)]
    plan = let_in(admission, w.table, w.planner, client, request, tasks, 0)
    entry = w.table.admit(
        client,
        request.request_id,
        (task,),
        plan,
        rows=rows,
        deadline_ns=1000 * MS,
        received_ns=0,
        retained=None,
        charged=desc.nbytes,
    )
    admission.enter(entry.ticket, client, (task,), 1000 * MS, 0)
    return entry


def let(w: World, admission: Admission, client: bytes, numbers: range, task: str = "a") -> int:
    """How many of these may wait."""
    for admitted, rid in enumerate(numbers):
        try:
            assert enter(w, admission, client, task, rid).waits_for
        except RequestError as exc:
            refused = exc
        else:
            continue
        assert refused.code == "OVERLOADED"
        assert refused.retry_after_ms == 1000
        return admitted
    return len(numbers)


def apart() -> tuple[World, Mapping[str, tuple[str, ...]]]:
    """Two tasks without a common block; the one of "a" is away."""
    paths = {"a": ("trunk",), "z": ("other",)}
    w = World()
    w.publish(other=[4], paths=paths)
    return w, paths


def test_what_waits_leaves_half_of_the_credits_to_others() -> None:
    w, paths = apart()
    admission = Admission(20, 20, 1 << 20)
    assert let(w, admission, b"one", range(20)) == 10
    assert admission.refused["waiting"] == 1
    for n in range(30, 40):
        assert enter(w, admission, b"one", "z", n).waits_for == ""
    assert len(w.publish(trunk=[5], other=[4], paths=paths)) == 10
    # They have set out: the next ones are a matter of credits again.
    with pytest.raises(RequestError, match="20 credits"):
        enter(w, admission, b"one", "a", 50)


def test_clients_share_the_places_to_wait() -> None:
    w, _ = apart()
    admission = Admission(80, 80, 1 << 20)
    assert let(w, admission, b"greedy", range(80)) == 40
    assert let(w, admission, b"late", range(100, 180)) == 20  # an even share of 40
    assert let(w, admission, b"later", range(200, 280)) == 0  # 60 of 80: that is all
    assert len(w.table) == 60


def test_so_does_their_memory() -> None:
    w, _ = apart()
    admission = Admission(100, 100, 16 * 64)
    assert let(w, admission, b"one", range(99)) == 32  # of 16 bytes each
    assert w.table.charged == 8 * 64


def test_a_task_takes_no_more_rows_than_its_bound() -> None:
    w, admission = World(trunk=[1]), Admission(20, 20, 1 << 20)
    table = w.planner.table
    assert table is not None
    w.planner.replace(replace(table, tasks={"t": replace(table.tasks["t"], max_inflight_rows=3)}))
    for rid, rows in enumerate((2, 1)):
        enter(w, admission, b"one", "t", rid, rows)
    with pytest.raises(RequestError, match="'t' has 3 of 3 rows under way"):
        enter(w, admission, b"one", "t", 2)


def test_time_in_the_waiting_room_says_nothing_about_queues() -> None:
    class Learnt(Admission):
        count = 0

        def expired(self, *_: Any) -> None:
            Learnt.count += 1

    admission = Learnt(10, 10, 1 << 20)
    late = RequestError("DEADLINE_EXCEEDED", "late")
    for setting_out_ms, counts in ((0, 1), (449, 1), (450, 0)):
        Learnt.count = 0
        w, entry = parked(deadline_ns=1000 * MS)
        w.publish(trunk=[5], head_a=[2])
        entry.received_ns, entry.ingress_ns = 100 * MS, setting_out_ms * MS
        w.table.fail(entry, late)
        learn(admission, entry, entry.results(), 1000 * MS)
        assert Learnt.count == counts
    w, entry = parked(deadline_ns=1000 * MS)
    w.table.tick(1000 * MS)
    learn(admission, entry, entry.results(), 1000 * MS)
    assert Learnt.count == 0


# --- further attempts


def test_what_an_attempt_has_left_behind_is_named() -> None:
    w = World(trunk=[1, 2], head_a=[3], head_b=[4])
    entry = w.admit("a", "b")
    plan = entry.plan
    w.answer(entry, end=1)
    w.die(3)
    (left,) = w.superseded
    assert (left.ticket, left.attempt, left.plan) == (entry.ticket, 1, plan)
    assert left.ends == (plan.ends[0],)  # the other one has its result


def opposed(*lives: tuple[str, int], slots: int = 3) -> RouteTable:
    """Workers A (a), B (b): one task goes there, one back; incarnations as given."""
    stages = {
        life * 10: StageRoute(
            life * 10, block, f"{block}#{life}", life, f"ipc://{life}", "tensormq", slots=slots
        )
        for block, life in lives
    }
    paths = {"there": ("a", "b"), "back": ("b", "a")}
    return RouteTable(1, 1, stages, {n: TaskRoute(n, p, CONTRACT) for n, p in paths.items()})


def guarded(planner: Planner) -> tuple[str, Plan]:
    """The task that goes back in the order of the workers."""
    plans = {n: planner.way([planner.task(n)]) for n in ("there", "back")}
    ((name, plan),) = [(n, p) for n, p in plans.items() if p.guards]
    return name, plan


def test_no_more_go_back_than_their_worker_has_slots_for() -> None:
    w, admission = World(), Admission(20, 20, 1 << 20)
    w.planner.replace(opposed(("a", 1), ("b", 2)))
    name, _ = guarded(w.planner)
    for rid in range(2):  # one of three slots is for what goes forward
        enter(w, admission, b"one", name, rid)
    with pytest.raises(RequestError, match="no slot left for tensors on their way back") as caught:
        enter(w, admission, b"one", name, 2)
    assert (caught.value.code, admission.refused["edge"]) == ("OVERLOADED", 1)


def test_further_attempts_are_counted_on_opposed_paths() -> None:
    planner = Planner()
    planner.replace(opposed(("a", 1), ("b", 2)))
    table = InFlightTable(7, planner, RetryBudget(50))
    name, plan = guarded(planner)
    first, second = plan.incarnations
    given: dict[str, Any] = {"rows": 1, "deadline_ns": 9 * SECOND, "received_ns": 0}
    given |= {"retained": None, "charged": 1}

    def admit(rid: int) -> Entry:
        way = planner.way([planner.task(name)])
        assert not planner.edges.full(way.guards)
        return table.admit(b"c", rid.to_bytes(16, "big"), (name,), way, **given)

    old = [admit(n) for n in range(2)]  # one of three slots is for what goes forward
    block = {v: k for k, v in {"a": 1, "b": 2}.items()}
    # The guarded worker is replaced; its successor gets new requests before the old ones are lost.
    after = opposed((block[first], 8), (block[second], second), (block[first], first))
    planner.replace(after)
    planner.peer_gone(first)
    new = [admit(n) for n in range(10, 12)]
    assert planner.edges.full(new[0].plan.guards)
    table.peer_gone(Death.of(first, []), 0)
    assert [e.waits_for for e in old] == [EDGE, EDGE]
    assert [e.attempt for e in old] == [2, 2]

    def answer(entry: Entry) -> list[Any]:
        end = entry.plan.ends[0]
        sender = entry.plan.incarnations[end]
        return table.outcome(entry.ticket, entry.attempt, end, sender, Answer("x", (), 0))

    # Each that ends makes room for one of them, in their order.
    assert answer(new[0]) == [*done(new[0]), SendAgain(old[0])]
    assert old[1].waits_for == EDGE
    assert table.client_gone(b"nobody") == []
    out = table.cancel(b"c", new[1].request_id)
    assert out == [*done(new[1]), SendAgain(old[1])]
    assert answer(old[0]) == done(old[0])
    assert answer(old[1]) == done(old[1])
    assert planner.edges._held == {}
