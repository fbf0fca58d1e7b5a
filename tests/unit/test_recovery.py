"""What becomes of requests whose worker dies: run again, parked, blamed, or ended with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recovery_rig import SECOND, World, codes, done, message

from blockflow.core.errors import CODES, BlockError, RequestError
from blockflow.core.model import Contract, TensorSpec
from blockflow.dispatcher.entry import Answer, Drop, Entry, ReleaseInput, SendAgain
from blockflow.dispatcher.retry import RetryBudget

WIDER = Contract(TensorSpec("float32", ("rows", 8)), TensorSpec("float32", ("rows", 4)))


def test_a_request_runs_again_elsewhere_as_the_next_attempt() -> None:
    w = World(trunk=[1, 2], head_a=[3])
    entry = w.admit("a")
    first = entry.plan.incarnations[0]
    assert w.die(first) == [SendAgain(entry)]
    assert entry.attempt == 2
    assert entry.plan.incarnations == (3 - first, 3)
    assert entry.item(0).attempt == 2
    assert not entry.item(0).alone
    # What the first attempt still brings is fenced off.
    assert w.table.outcome(entry.ticket, 1, 1, 3, Answer("old", (), 0)) == [Drop("old_attempt")]
    assert w.answer(entry) == done(entry)
    assert entry.results()[0].outcome == Answer(2, (), 0)
    assert w.left() == (0, 0, 0)


def test_without_a_worker_it_waits_for_routes_with_one() -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    assert w.die(1) == []
    assert w.left()[:2] == (1, 1)
    assert w.table.oldest_version() is None  # it holds no old version back
    assert w.publish(head_a=[2]) == []
    assert w.table.outcome(entry.ticket, 2, 1, 2, Answer("forged", (), 0)) == [
        Drop("not_under_way")
    ]
    assert w.publish(trunk=[5], head_a=[2]) == [SendAgain(entry)]
    assert w.answer(entry) == done(entry)
    gauges = w.table.gauges()
    assert (gauges["rerun"], gauges["parked"], gauges["waiting"]) == (1, 1, 0)


def test_what_waits_in_vain_says_for_what() -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    w.die(1)
    assert w.table.tick(10 * SECOND) == done(entry)
    assert codes(entry) == ["DEADLINE_EXCEEDED"]
    assert "attempt 2 waited for a worker of block 'trunk'" in message(entry)
    assert w.left() == (0, 0, 0)


def test_a_block_that_was_given_up_is_not_waited_for() -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    w.die(1)
    out = w.publish(head_a=[2], down={"trunk": "it was given up: 5 crashes within 60 s"})
    assert out == done(entry)
    assert codes(entry) == ["BLOCK_UNAVAILABLE"]
    assert "5 crashes" in message(entry)


def test_three_attempts_are_all() -> None:
    w = World(trunk=[1], head_a=[9])
    entry = w.admit("a")
    w.die(1)
    w.publish(trunk=[2], head_a=[9])
    w.die(2)
    w.publish(trunk=[3], head_a=[9])
    assert entry.attempt == 3
    assert w.die(3) == done(entry)
    assert (codes(entry), w.table.gauges()["attempts_spent"]) == (["WORKER_LOST"], 1)
    assert "run 3 times" in message(entry)
    (end,) = entry.results()
    assert isinstance(end.outcome, RequestError) and end.outcome.hint == "send it again"


def test_no_rerun_without_time() -> None:
    w = World(trunk=[1, 2], head_a=[3])
    entry = w.admit("a", deadline_ns=SECOND)
    out = w.die(entry.plan.incarnations[0], now_ns=SECOND - 1000)
    assert out == done(entry)
    assert "no time" in message(entry)


def test_the_budget_covers_a_full_house_twice_and_then_denies() -> None:
    w = World(budget=5, trunk=[1], head_a=[99])
    entries = [w.admit("a") for _ in range(5)]
    for life in (1, 2):
        w.die(life)
        assert w.publish(trunk=[life + 1], head_a=[99]) == [SendAgain(e) for e in entries]
    for entry in entries:
        w.answer(entry)
    late = w.admit("a")
    assert w.die(3) == done(late)
    assert codes(late) == ["WORKER_LOST"]
    assert "too many" in message(late)
    assert w.table.gauges()["budget_denied"] == 1


@pytest.mark.parametrize("ended", [0, 1])
def test_finished_tasks_keep_their_results(ended: int) -> None:
    """The next attempt has nodes of its own, whatever those of the one before were."""
    w = World(trunk=[1, 2], head_a=[3, 4], head_b=[5, 6])
    entry = w.admit("a", "b")
    assert w.answer(entry, end=ended) == []
    kept = entry.plan
    head = entry.plan.incarnations[entry.plan.ends[1 - ended]]
    assert w.die(head) == [SendAgain(entry)]
    assert [t.name for t in entry.plan.tasks] == ["ba"[ended]]
    assert w.answer(entry) == done(entry)
    results = entry.results()
    assert [r.task for r in results] == ["a", "b"]
    finished, again = results[ended], results[1 - ended]
    assert (finished.outcome.payload, finished.plan) == (1, kept)
    assert (again.outcome.payload, again.plan) == (2, entry.plan)


def test_a_death_on_no_open_way_changes_nothing() -> None:
    w = World(trunk=[1], head_a=[2], head_b=[3])
    entry = w.admit("t", "a")
    other = w.admit("b")
    w.answer(entry, end=0)
    assert w.die(77) == []
    assert w.die(77, now_ns=10 * SECOND) == []  # nor is it said that no time was left
    assert w.die(3) == []  # "b" waits, "t" and "a" are not concerned
    assert (entry.attempt, other.attempt) == (1, 2)
    assert w.answer(entry) == done(entry)


def test_permanent_failures_are_not_run_again() -> None:
    w = World(once=["trunk"], trunk=[1, 2], head_a=[3])
    entry = w.admit("a")
    error = BlockError("BLOCK_FAILED", "broken")
    out = w.table.failure(entry.ticket, 1, 0, entry.plan.incarnations[0], error, 0)
    assert out == done(entry)
    assert (entry.results()[0].outcome, w.table.gauges()["rerun"]) == (error, 0)


# --- rumours


def test_that_a_peer_is_lost_is_decided_by_the_proof() -> None:
    w = World(trunk=[1], head_a=[2, 3])
    entry = w.admit("a")
    head = entry.plan.incarnations[1]
    rumour = RequestError("WORKER_LOST", "the next hop's worker is gone")
    assert w.table.failure(entry.ticket, 1, 1, 1, rumour, 0) == []
    assert w.die(head, now_ns=5) == [SendAgain(entry)]
    # The rumour, and one that comes late, are of an attempt that is over.
    assert w.table.failure(entry.ticket, 1, 1, 1, rumour, 6) == [Drop("old_attempt")]
    assert w.table.tick(6 * SECOND) == []
    assert w.answer(entry) == done(entry)


def test_a_rumour_without_a_proof_ends_the_request() -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    rumour = RequestError("WORKER_LOST", "no route to stage 9 any more")
    w.table.failure(entry.ticket, 1, 1, 1, rumour, 0)
    assert w.table.next_deadline() == 5 * SECOND
    assert w.table.tick(5 * SECOND - 1) == []
    assert w.table.tick(5 * SECOND) == done(entry)
    assert codes(entry) == ["WORKER_LOST"]


# --- epochs


def test_a_rerun_may_use_a_newer_epoch_with_the_same_contract() -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    w.die(1)
    assert w.publish(epoch=2, trunk=[5], head_a=[6]) == [SendAgain(entry)]
    assert entry.item(0).epoch == 2
    assert set(entry.plan.incarnations) == {5, 6}  # none of the old epoch's


@pytest.mark.parametrize(
    "change", [{"contract": WIDER}, {"paths": {"b": ("trunk", "head_b")}}], ids=str
)
def test_a_changed_task_is_not_run_again(change: dict[str, Any]) -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    w.die(1)
    assert w.publish(epoch=2, trunk=[5], head_a=[6], **change) == done(entry)
    assert codes(entry) == ["WORKER_LOST"]
    assert "'a'" in message(entry)


def test_one_reply_never_mixes_epochs() -> None:
    w = World(trunk=[1], head_a=[2], head_b=[3])
    entry = w.admit("a", "b")
    w.answer(entry, end=1)
    w.die(2)
    assert w.publish(epoch=2, trunk=[5], head_a=[6], head_b=[7]) == done(entry)
    assert codes(entry) == ["WORKER_LOST"]
    assert entry.results()[1].outcome == Answer(1, (), 0)


# --- replayable: false


def test_what_may_have_begun_is_not_run_twice() -> None:
    w = World(once=["head_a"], trunk=[1, 2], head_a=[3])
    entry = w.admit("a")
    assert w.die(entry.plan.incarnations[0]) == done(entry)
    assert codes(entry) == ["WORKER_LOST"]
    assert "the worker of trunk died" in message(entry)
    assert "'head_a' must not run twice" in message(entry)
    assert w.table.gauges()["not_replayable"] == 1


def test_what_has_certainly_not_begun_is_run_again() -> None:
    w = World(once=["head_a"], trunk=[1, 2], head_a=[3])
    at_work, unsent = w.admit("a"), w.admit("a")
    trunk = at_work.plan.incarnations[0]
    assert unsent.plan.incarnations[0] != trunk  # in turn
    assert w.die(trunk, at_work, hop=0) == [SendAgain(at_work)]
    assert w.die(unsent.plan.incarnations[0], at_work, unsent=[unsent])[:1] != done(unsent)
    assert unsent.waits_for == "a worker of block 'trunk'"


def test_the_block_at_work_itself_may_have_begun() -> None:
    w = World(once=["trunk"], trunk=[1, 2], head_a=[3])
    entry = w.admit("a")
    assert w.die(entry.plan.incarnations[0], entry, hop=0) == done(entry)


def fate(w: World, entry: Entry, how: str) -> None:
    """One of the ends of a request that a client may send again."""
    first, head = entry.plan.incarnations[:2]
    if how == "death":
        w.die(head)
    elif how == "no time is left":
        w.die(head, now_ns=10 * SECOND)
    elif how == "rumour":
        lost = RequestError("WORKER_LOST", "the next hop's worker is gone")
        w.table.failure(entry.ticket, 1, 1, first, lost, 0)
        w.table.tick(6 * SECOND)
    elif how == "deadline":
        w.table.tick(10 * SECOND)
    elif how == "failure":
        gone = RequestError("BLOCK_UNAVAILABLE", "its own worker says so")
        w.table.failure(entry.ticket, 1, 0, first, gone, 0)
    else:
        w.table.abort_all(RequestError("BLOCK_UNAVAILABLE", "shutting down"))


@pytest.mark.parametrize(
    "how", ["death", "no time is left", "rumour", "deadline", "failure", "shutdown"]
)
def test_what_may_have_run_is_not_called_retryable(how: str) -> None:
    """A client that sends again what is retryable would run the block twice."""
    w = World(once=["trunk"], trunk=[1], head_a=[2])
    entry = w.admit("a")
    fate(w, entry, how)
    (error,) = [e.outcome for e in entry.results()]
    assert isinstance(error, RequestError) and CODES[error.code].retryable
    assert not error.retryable
    assert "only if that does no harm" in error.hint and "'trunk'" in error.hint


@pytest.mark.parametrize("how", ["no time is left", "rumour", "deadline", "failure", "shutdown"])
def test_without_such_a_block_it_is(how: str) -> None:
    w = World(trunk=[1], head_a=[2])
    entry = w.admit("a")
    fate(w, entry, how)
    (error,) = [e.outcome for e in entry.results()]
    assert isinstance(error, RequestError) and error.retryable


def test_and_so_it_is_where_such_a_block_has_not_begun() -> None:
    w = World(once=["head_a"], trunk=[1], head_a=[2])
    rumour = RequestError("WORKER_LOST", "the next hop's worker is gone")
    entry = w.admit("a")
    w.table.failure(entry.ticket, 1, 1, 1, rumour, 0)  # the trunk's worker says so
    w.table.tick(6 * SECOND)
    unsent = w.admit("a")
    w.table.fail(unsent, RequestError("BLOCK_UNAVAILABLE", "it could not be sent"))
    late = w.admit("a")
    w.die(1, late, now_ns=10 * SECOND)
    for ended in (entry, unsent, late):
        (error,) = [e.outcome for e in ended.results()]
        assert isinstance(error, RequestError) and error.retryable


def test_a_rerun_waits_for_tasks_whose_blocks_must_not_run_twice() -> None:
    w = World(once=["head_b"], trunk=[1], head_a=[2, 3], head_b=[4])
    entry = w.admit("a", "b")
    assert w.die(entry.plan.incarnations[entry.plan.ends[0]]) == []
    assert entry.attempt == 1  # "b" goes on in it
    assert w.answer(entry, end=1) == [SendAgain(entry)]
    assert [t.name for t in entry.plan.tasks] == ["a"]
    assert w.answer(entry) == done(entry)
    assert [e.outcome.payload for e in entry.results()] == [2, 1]


def test_what_waits_for_such_a_task_is_charged_once() -> None:
    w = World(budget=1, once=["head_b"], trunk=[1], head_a=[2], head_b=[4], mid=[5])
    entry = w.admit("t", "a", "b", "deep")
    w.answer(entry, end=0)
    assert w.die(2) == []  # "a" and "deep"
    assert w.die(5) == []  # "deep" is lost already
    w.publish(trunk=[1], head_a=[6], head_b=[4], mid=[7])
    assert w.answer(entry, end=2) == [SendAgain(entry)]
    assert w.table.gauges()["budget"] == 1
    assert w.answer(entry, end=0) == []
    assert w.answer(entry, end=1) == done(entry)


def test_a_further_death_does_not_fail_what_waits_for_its_next_attempt() -> None:
    """The block that must not run twice was in the second worker to die, which has never had it."""
    w = World(once=["head_a", "head_b"], trunk=[1], mid=[5], head_a=[2], head_b=[4])
    entry = w.admit("b", "deep")
    assert w.die(5, entry, hop=entry.plan.blocks.index("mid")) == []
    assert w.die(2) == []
    assert (entry.lost, entry.outcomes) == ({entry.plan.ends[1]}, {})
    w.publish(trunk=[1], mid=[6], head_a=[7], head_b=[4])
    assert w.answer(entry, end=0) == [SendAgain(entry)]
    assert w.answer(entry) == done(entry)
    assert [e.outcome.payload for e in entry.results()] == [1, 2]


def test_only_the_tasks_through_such_a_block_fail() -> None:
    w = World(once=["head_b"], trunk=[1, 2], head_a=[3], head_b=[4])
    entry = w.admit("a", "b")
    assert w.die(entry.plan.incarnations[0]) == [SendAgain(entry)]
    assert [t.name for t in entry.plan.tasks] == ["a"]
    assert w.answer(entry) == done(entry)
    assert [type(e.outcome) for e in entry.results()] == [Answer, RequestError]


# --- ends of other kinds, between two attempts


def test_cancel_client_gone_and_the_end_reach_what_waits() -> None:
    for end in ("cancel", "client_gone", "abort_all"):
        w = World(trunk=[1], head_a=[2])
        entry = w.admit("a")
        w.die(1)
        if end == "cancel":
            assert w.table.cancel(b"client", entry.request_id) == done(entry)
        elif end == "client_gone":
            assert w.table.client_gone(b"client") == [ReleaseInput(entry)]
        else:
            assert w.table.abort_all(RequestError("NOT_READY", "over")) == done(entry)
        assert w.left() == (0, 0, 0)


def test_the_budget_fills_with_admissions_and_not_with_time() -> None:
    budget = RetryBudget(10)
    assert [budget.take(0, 0) for _ in range(21)] == [True] * 20 + [False]
    assert budget.take(10, 0)  # a tenth of what was admitted
    assert not budget.take(19, 0)
    assert budget.take(20, 0)
    assert not budget.take(20, 59 * SECOND)
    assert budget.take(20, 60 * SECOND)  # the first one after a minute of rest
    assert not budget.take(20, 119 * SECOND)
    assert budget.take(20, 3600 * SECOND)
    assert not budget.take(20, 3600 * SECOND)
    assert budget.take(10_000, 3600 * SECOND)
    assert budget.left() == 19


@given(
    max_inflight=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.sampled_from((0, 1, 20, 59, 60, 400)), st.integers(0, 40), st.integers(0, 9)),
        max_size=60,
    ),
)
def test_from_any_moment_on_the_budget_allows_a_tenth(
    max_inflight: int, steps: list[tuple[int, int, int]]
) -> None:
    """Whatever comes when, and whatever dies: (seconds, requests admitted, re-runs wanted)."""
    budget = RetryBudget(max_inflight)
    now = admitted = granted = 0
    before: list[tuple[int, int, int]] = []
    for seconds, requests, wanted in steps:
        before.append((now, admitted, granted))
        now += seconds * SECOND
        admitted += requests
        rested = seconds >= 60
        for nth in range(wanted):
            allowed = budget.take(admitted, now)
            assert allowed or not (rested and nth == 0)
            granted += allowed
        for then, had, was in before:
            a_minute = (now - then) // (60 * SECOND) + 1
            assert granted - was <= (admitted - had) / 10 + budget.capacity + a_minute
