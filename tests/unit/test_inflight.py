"""The in-flight table, event by event."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from blockflow.core.errors import BlockError, RequestError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import RouteTable, StageRoute, TaskRoute
from blockflow.dispatcher.entry import Answer, Drop, Entry, ReleaseInput, Reply
from blockflow.dispatcher.inflight import InFlightTable
from blockflow.dispatcher.plan import Planner
from blockflow.dispatcher.retry import RetryBudget

CONTRACT = Contract(TensorSpec("float32", ("rows", 4)), TensorSpec("float32", ("rows", 4)))
TRUNK, HEAD_A, HEAD_B = 101, 102, 103
SECOND, MS = 1_000_000_000, 1_000_000


def routes(version: int = 1) -> RouteTable:
    """Task "a" is trunk -> head_a, "b" trunk -> head_b, "t" the trunk alone."""
    return RouteTable(
        version,
        version,
        {
            s: StageRoute(s, block, f"{block}#0", inc, f"ipc://{inc}", "tensormq")
            for s, block, inc in (
                (1, "trunk", TRUNK),
                (2, "head_a", HEAD_A),
                (3, "head_b", HEAD_B),
            )
        },
        {
            name: TaskRoute(name, path, CONTRACT)
            for name, path in (
                ("a", ("trunk", "head_a")),
                ("b", ("trunk", "head_b")),
                ("t", ("trunk",)),
            )
        },
    )


def new_table(incarnation: int = 7) -> InFlightTable:
    return InFlightTable(incarnation, Planner(), RetryBudget(100))


def admit(
    table: InFlightTable,
    *tasks: str,
    client: bytes = b"c",
    rid: int = 1,
    deadline_ns: int = SECOND,
    version: int = 1,
) -> Entry:
    tasks = tasks or ("a",)
    planner = table._planner
    if planner.version < version:
        planner.replace(routes(version))
    return table.admit(
        client,
        rid.to_bytes(16, "big"),
        tasks,
        planner.plan([planner.task(t) for t in tasks]),
        rows=2,
        deadline_ns=deadline_ns,
        received_ns=0,
        retained="input",
        charged=32,
    )


def answer(payload: Any = "out") -> Answer:
    return Answer(payload, (), 0)


def error(code: str = "BLOCK_FAILED") -> BlockError:
    return BlockError(code, "broken")


@pytest.fixture
def table() -> InFlightTable:
    return new_table()


def kinds(instructions: list[Any]) -> list[type]:
    return [type(i) for i in instructions]


def test_a_result_gives_the_reply_and_frees_the_input(table: InFlightTable) -> None:
    entry = admit(table)
    out = table.outcome(entry.ticket, 1, 1, HEAD_A, answer())
    assert out == [Reply(entry), ReleaseInput(entry)]
    assert entry.results() == [("a", entry.plan, 1, answer(), 0)]
    assert len(table) == 0
    assert table.charged == 0
    assert table.of_client(b"c") == 0
    assert table.oldest_version() is None
    assert table.next_deadline() is None


def test_tickets_name_the_dispatchers_life_and_never_repeat(table: InFlightTable) -> None:
    one = admit(table, rid=5, client=b"x")
    two = admit(table, rid=5, client=b"y")
    assert one.ticket != two.ticket
    assert one.ticket.startswith((7).to_bytes(8, "big"))
    assert len(one.ticket) == 16
    assert new_table(8)._prefix != table._prefix


def test_a_duplicate_id_of_one_client_is_refused_and_the_first_lives(table: InFlightTable) -> None:
    entry = admit(table)
    with pytest.raises(RequestError) as caught:
        admit(table)
    assert caught.value.code == "DUPLICATE_REQUEST"
    assert len(table) == 1
    assert table.charged == 32
    assert kinds(table.outcome(entry.ticket, 1, 1, HEAD_A, answer())) == [Reply, ReleaseInput]
    admit(table)  # the id is free again


def test_several_tasks_wait_for_each_other(table: InFlightTable) -> None:
    entry = admit(table, "a", "b")
    first, second = entry.plan.ends
    assert table.outcome(entry.ticket, 1, second, HEAD_B, answer("B")) == []
    out = table.outcome(entry.ticket, 1, first, HEAD_A, answer("A"))
    assert kinds(out) == [Reply, ReleaseInput]
    assert [e.outcome.payload for e in entry.results()] == ["A", "B"]


def test_a_failed_trunk_fails_all_tasks_below(table: InFlightTable) -> None:
    entry = admit(table, "a", "b")
    out = table.failure(entry.ticket, 1, 0, TRUNK, error(), 0)
    assert kinds(out) == [Reply, ReleaseInput]
    assert [e.outcome.code for e in entry.results()] == ["BLOCK_FAILED", "BLOCK_FAILED"]


def test_a_failed_head_leaves_the_other_alone(table: InFlightTable) -> None:
    entry = admit(table, "a", "b")
    hop_a, hop_b = entry.plan.ends
    assert table.failure(entry.ticket, 1, hop_a, HEAD_A, error(), 0) == []
    assert kinds(table.outcome(entry.ticket, 1, hop_b, HEAD_B, answer())) == [Reply, ReleaseInput]
    results = entry.results()
    assert results[0].outcome.code == "BLOCK_FAILED"
    assert results[1].outcome == answer()


def test_a_late_trunk_failure_spares_the_task_that_is_answered(table: InFlightTable) -> None:
    entry = admit(table, "a", "b")
    table.outcome(entry.ticket, 1, entry.plan.ends[0], HEAD_A, answer())
    table.failure(entry.ticket, 1, 0, TRUNK, error(), 0)
    assert entry.results()[0].outcome == answer()
    assert entry.results()[1].outcome.code == "BLOCK_FAILED"


def test_an_inner_node_may_be_an_end(table: InFlightTable) -> None:
    entry = admit(table, "t", "a")
    assert table.outcome(entry.ticket, 1, 0, TRUNK, answer("T")) == []
    assert kinds(table.outcome(entry.ticket, 1, 1, HEAD_A, answer("A"))) == [Reply, ReleaseInput]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ticket": b"\0" * 16}, "unknown"),
        ({"attempt": 2}, "old_attempt"),
        ({"hop": 0}, "not_an_end"),
        ({"hop": 9}, "off_path"),
        ({"sender": HEAD_B}, "wrong_sender"),
    ],
)
def test_what_is_not_current_is_dropped_and_counted(
    table: InFlightTable, change: dict[str, Any], reason: str
) -> None:
    entry = admit(table)
    given = {"ticket": entry.ticket, "attempt": 1, "hop": 1, "sender": HEAD_A, **change}
    assert table.outcome(**given, answer=answer()) == [Drop(reason)]
    assert isinstance(table.expecting(**given), Drop)
    assert table.dropped[reason] == 2
    assert kinds(table.outcome(entry.ticket, 1, 1, HEAD_A, answer())) == [Reply, ReleaseInput]
    assert table.outcome(entry.ticket, 1, 1, HEAD_A, answer()) == [Drop("unknown")]


def test_a_second_result_changes_nothing(table: InFlightTable) -> None:
    entry = admit(table, "a", "b")
    hop = entry.plan.ends[0]
    table.outcome(entry.ticket, 1, hop, HEAD_A, answer("first"))
    assert table.outcome(entry.ticket, 1, hop, HEAD_A, answer("second")) == [Drop("answered")]
    assert table.failure(entry.ticket, 1, hop, HEAD_A, error(), 0) == [Drop("answered")]
    assert entry.outcomes[hop] == answer("first")


def test_only_workers_of_the_path_may_report_a_failure(table: InFlightTable) -> None:
    entry = admit(table, "a")
    assert table.failure(entry.ticket, 1, 1, HEAD_B, error(), 0) == [Drop("wrong_sender")]
    # The trunk's worker speaks for the head that it cannot reach.
    assert kinds(table.failure(entry.ticket, 1, 1, TRUNK, error(), 0)) == [Reply, ReleaseInput]


def test_deadlines_come_in_order_and_keep_what_is_answered(table: InFlightTable) -> None:
    late = admit(table, "a", rid=1, deadline_ns=3 * SECOND)
    soon = admit(table, "a", "b", rid=2, deadline_ns=1 * SECOND)
    table.outcome(soon.ticket, 1, soon.plan.ends[1], HEAD_B, answer())
    assert table.next_deadline() == SECOND
    assert table.tick(SECOND - 1) == []
    assert table.tick(SECOND) == [Reply(soon), ReleaseInput(soon)]
    first, second = (e.outcome for e in soon.results())
    assert first.code == "DEADLINE_EXCEEDED"
    assert first.message == "no result within 1000 ms"
    assert second == answer()
    assert table.next_deadline() == 3 * SECOND
    assert table.tick(10 * SECOND) == [Reply(late), ReleaseInput(late)]


def test_the_deadline_heap_does_not_grow_with_what_has_ended(table: InFlightTable) -> None:
    for n in range(5000):
        entry = admit(table, rid=n, deadline_ns=60 * SECOND)
        table.outcome(entry.ticket, 1, 1, HEAD_A, answer())
    assert len(table._deadlines) < 600


def test_whoever_is_left_is_due_at_its_deadline_all_the_same(table: InFlightTable) -> None:
    rng, left = Random(1), dict[int, Entry]()
    for n in range(5000):
        due = rng.randrange(SECOND, 60 * SECOND)
        entry = admit(table, rid=n, deadline_ns=due)
        if n % 50:
            table.outcome(entry.ticket, 1, 1, HEAD_A, answer())
        else:
            left[due] = entry
    for due in sorted(left):
        assert table.next_deadline() == due
        assert table.tick(due) == [Reply(left[due]), ReleaseInput(left[due])]


def test_a_tasks_rows_under_way_are_those_of_its_requests(table: InFlightTable) -> None:
    both, one = admit(table, "a", "b", rid=1), admit(table, "a", rid=2)
    assert [table.rows_of(task) for task in "abt"] == [4, 2, 0]
    table.outcome(one.ticket, 1, 1, HEAD_A, answer())
    table.cancel(b"c", both.request_id)
    assert [table.rows_of(task) for task in "abt"] == [0, 0, 0]


def test_cancel_answers_the_open_tasks(table: InFlightTable) -> None:
    entry = admit(table)
    assert table.cancel(b"other", entry.request_id) == [Drop("cancel_unknown")]
    assert table.cancel(b"c", entry.request_id) == [Reply(entry), ReleaseInput(entry)]
    assert entry.outcomes[1].code == "CANCELLED"


def test_a_client_that_left_gets_nothing(table: InFlightTable) -> None:
    mine = [admit(table, rid=n) for n in (1, 2)]
    other = admit(table, client=b"d")
    assert table.client_gone(b"c") == [ReleaseInput(e) for e in mine]
    assert table.client_gone(b"c") == []
    assert len(table) == 1
    assert table.outcome(mine[0].ticket, 1, 1, HEAD_A, answer()) == [Drop("unknown")]
    assert kinds(table.outcome(other.ticket, 1, 1, HEAD_A, answer())) == [Reply, ReleaseInput]


def test_what_goes_to_the_first_stage(table: InFlightTable) -> None:
    entry = admit(table, deadline_ns=5 * MS)
    entry.plan = replace(entry.plan, epoch=3, share=2)
    item = entry.item(2 * MS)
    assert (item.request_id, item.attempt, item.rows) == (entry.ticket, 1, 2)
    assert (item.epoch, item.task, item.hop, item.alone) == (3, 2, 0, False)
    left = [entry.item(now_ns).remaining_ms for now_ns in (2 * MS, 5 * MS, 5 * MS + 1)]
    assert left == [3, 0, 0]


def test_a_request_that_could_not_be_sent_fails_once(table: InFlightTable) -> None:
    entry = admit(table)
    assert kinds(table.fail(entry, error("BLOCK_FAILED"))) == [Reply, ReleaseInput]
    assert table.fail(entry, error()) == []


def test_the_end_answers_everything(table: InFlightTable) -> None:
    entries = [admit(table, rid=n) for n in range(3)]
    out = table.abort_all(RequestError("BLOCK_UNAVAILABLE", "over"))
    assert out == [i for e in entries for i in (Reply(e), ReleaseInput(e))]
    assert len(table) == 0


def test_the_oldest_version_is_what_holds_back_an_update(table: InFlightTable) -> None:
    old = admit(table, rid=1, version=3)
    admit(table, rid=2, version=4)
    assert table.oldest_version() == 3
    table.outcome(old.ticket, 1, 1, HEAD_A, answer())
    assert table.oldest_version() == 4
