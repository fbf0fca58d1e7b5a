"""The client's protocol core: events in, outcomes out, no sockets."""

from __future__ import annotations

import pytest
from client_core_rig import (
    BODY,
    DESC,
    MS,
    connected_core,
    description,
    new_core,
    only,
    reply,
    rid,
    send_all,
    submit,
)

from blockflow.client.core import GRACE_NS
from blockflow.client.outcome import Answered, Described, Failed
from blockflow.core import limits
from blockflow.core.errors import RequestError, make_error
from blockflow.wire.client import (
    UNASKED,
    Cancel,
    Describe,
    Description,
    Reply,
    Request,
    TaskResult,
    encode_to_client,
)
from blockflow.wire.codec import decode, encode


def test_a_request_goes_out_once_and_its_reply_ends_it() -> None:
    core = connected_core()
    submit(core, 1)
    sent = send_all(core, now=5 * MS)
    assert sent == [Request(rid(1), ("t",), 995, DESC)]
    done = only(core.on_message(reply(1), 7 * MS))
    assert isinstance(done, Answered)
    assert (done.request_id, done.epoch, done.submitted_ns) == (rid(1), 1, 0)
    assert bytes(done.frames[0]) == bytes(16)
    assert len(core._pending) == 0
    assert core.next_wakeup() is None  # not at its deadline, for nothing
    assert core.on_message(reply(1), 8 * MS) == []
    assert core.counters.late_replies == 1


def test_nothing_is_sent_before_the_handshake() -> None:
    core = new_core()
    submit(core, 1)
    assert core.next_message(0) is None
    core.on_connected()
    assert len(send_all(core)) == 1


def test_a_full_socket_leaves_the_order_as_it_is() -> None:
    core = connected_core()
    for n in range(3):
        submit(core, n + 1)
    first = core.next_message(0)
    assert core.next_message(0) == first  # not sent: offered again
    assert [m.request_id for m in send_all(core)] == [rid(1), rid(2), rid(3)]


def test_the_deadline_has_a_grace_for_the_dispatchers_own_word() -> None:
    core = connected_core()
    submit(core, 1, deadline_ms=1000)
    send_all(core)
    assert core.on_tick(1000 * MS) == []
    assert core.next_wakeup() == 1000 * MS + GRACE_NS
    failed = only(core.on_tick(1000 * MS + GRACE_NS))
    assert failed.error.code == "DEADLINE_EXCEEDED"
    assert core.next_wakeup() is None


def test_an_unsent_request_expires_at_its_deadline() -> None:
    core = connected_core()
    submit(core, 1, deadline_ms=5000)  # longer than one waits for a connection
    assert only(core.on_tick(5000 * MS)).error.code == "DEADLINE_EXCEEDED"
    assert send_all(core) == []


@pytest.mark.parametrize(("before", "code"), [(False, "NOT_RUNNING"), (True, "CONNECTION_LOST")])
def test_no_connection_is_an_error_after_the_connect_timeout(before: bool, code: str) -> None:
    core = new_core()
    start = 0
    if before:
        core.on_connected()
        start = 50 * MS
        core.on_disconnected(start)
    submit(core, 1, now=start, deadline_ms=60_000)
    assert core.on_tick(start + 999 * MS) == []
    assert only(core.on_tick(start + 1000 * MS)).error.code == code


@pytest.mark.parametrize("before", [False, True])
def test_a_deadline_before_the_connect_timeout_says_nothing_of_who_is_there(before: bool) -> None:
    """The first calls of a client come while it is still connecting."""
    core = new_core()
    if before:
        core.on_connected()
        core.on_disconnected(0)
    submit(core, 1, deadline_ms=20)
    failed = only(core.on_tick(20 * MS))
    assert failed.error.code == "DEADLINE_EXCEEDED"
    assert failed.error.retryable
    assert "it could not be sent" in failed.error.message


def test_a_disconnect_ends_what_was_sent_and_keeps_what_was_not() -> None:
    core = connected_core()
    submit(core, 1)
    send_all(core)
    submit(core, 2)
    lost = only(core.on_disconnected(10 * MS))
    assert (lost.request_id, lost.error.code) == (rid(1), "CONNECTION_LOST")
    assert lost.error.retryable
    assert core.next_message(11 * MS) is None
    core.on_connected()
    assert [m.request_id for m in send_all(core, 12 * MS)] == [rid(2)]


def test_a_handshake_that_failed_is_named() -> None:
    core = new_core()
    core.link.trouble = "what listens there speaks another protocol"
    submit(core, 1)
    assert "another protocol" in only(core.on_tick(2000 * MS)).error.message


def test_a_refused_key_is_told_how_it_is_let_in() -> None:
    core = new_core()
    submit(core, 1)
    (failed,) = core.on_denied()
    assert failed.error.code == "UNAUTHORIZED"
    assert "keys authorise" in failed.error.hint  # who has a key needs no new one


def test_cancel_is_told_only_when_the_dispatcher_knows_the_request() -> None:
    core = connected_core()
    submit(core, 1)
    assert only(core.cancel(rid(1))).error.code == "CANCELLED"
    assert send_all(core) == []
    submit(core, 2)
    send_all(core)
    assert only(core.cancel(rid(2))).error.code == "CANCELLED"
    assert send_all(core) == [Cancel(rid(2))]
    assert core.cancel(rid(2)) == []


def test_an_id_may_be_used_again_after_its_end() -> None:
    core = connected_core()
    submit(core, 1)
    with pytest.raises(RequestError, match=r"DUPLICATE_REQUEST"):
        submit(core, 1)
    core.cancel(rid(1))
    submit(core, 1)
    assert len(send_all(core)) == 1
    assert isinstance(only(core.on_message(reply(1), 0)), Answered)


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_late_reply_is_never_taken_for_that_of_a_later_request(how: str) -> None:
    """Of the same id, which callers may choose: it would get the first one's result."""
    core = connected_core()
    submit(core, 1)
    send_all(core)
    if how == "cancelled":
        core.cancel(rid(1))
    else:
        assert only(core.on_tick(1000 * MS + GRACE_NS)).error.code == "DEADLINE_EXCEEDED"
    assert send_all(core, 1100 * MS) == [Cancel(rid(1))]
    with pytest.raises(RequestError, match=r"DUPLICATE_REQUEST.*still to come"):
        submit(core, 1, now=2000 * MS)
    assert core.on_message(reply(1), 2001 * MS) == []
    submit(core, 1, now=2002 * MS)
    assert len(send_all(core, 2003 * MS)) == 1
    assert isinstance(only(core.on_message(reply(1), 2004 * MS)), Answered)


def test_no_reply_comes_by_a_later_connection() -> None:
    core = connected_core()
    submit(core, 1)
    send_all(core)
    core.cancel(rid(1))
    core.on_disconnected(1 * MS)
    core.on_connected()
    submit(core, 1, now=2 * MS)
    assert len(send_all(core, 2 * MS)) == 1


def test_one_that_is_larger_than_the_bound_is_sent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNANSWERED_BYTES", 1)
    core = connected_core()
    submit(core, 1)
    submit(core, 2)
    assert [r.request_id for r in send_all(core)] == [rid(1)]
    assert only(core.on_message(reply(1), 1))
    assert [r.request_id for r in send_all(core)] == [rid(2)]


def test_max_pending_is_a_bound() -> None:
    core = new_core(max_pending=1)
    submit(core, 1)
    with pytest.raises(RequestError, match="OVERLOADED") as refused:
        submit(core, 2)
    assert refused.value.retry_after_ms, "what a caller's own loop waits for"


def test_without_a_deadline_the_tasks_own_is_learned_first() -> None:
    core = connected_core()
    submit(core, 1, deadline_ms=None)
    probe = only(send_all(core))
    assert isinstance(probe, Describe)
    core.on_message(description(probe.request_id, deadline_ms=300), 20 * MS)
    assert send_all(core, 20 * MS) == [Request(rid(1), ("t",), 280, DESC)]
    assert only(core.on_tick(400 * MS)).error.code == "DEADLINE_EXCEEDED"


def test_a_dispatcher_that_describes_nothing_costs_half_a_second_once() -> None:
    core = connected_core()
    submit(core, 1, deadline_ms=None)
    submit(core, 2, deadline_ms=None)
    send_all(core)
    assert core.next_wakeup() == 500 * MS
    core.on_tick(500 * MS)
    assert [m.deadline_ms for m in send_all(core, 500 * MS)] == [9500, 9500]


def test_a_newer_epoch_has_its_deadlines_learned_again() -> None:
    core = connected_core()
    submit(core, 1, deadline_ms=None)
    probe = only(send_all(core))
    core.on_message(description(probe.request_id, 300), 0)
    send_all(core)
    core.on_message(reply(1, epoch=2), 0)
    submit(core, 2, deadline_ms=None)
    assert isinstance(only(send_all(core)), Describe)
    # A straggler of the older epoch changes nothing.
    core.on_message(description(bytes(16), 700, epoch=2), 0)
    core.on_message(reply(9, epoch=1), 0)
    assert only(send_all(core)).deadline_ms == 700


def test_a_description_that_nobody_asked_for_tells_the_present_deadlines() -> None:
    core = connected_core()
    submit(core, 1, deadline_ms=None)
    core.on_message(description(only(send_all(core)).request_id, 300), 0)
    send_all(core)
    assert core.on_message(description(UNASKED, 700, epoch=2), 0) == []
    submit(core, 2, now=MS, deadline_ms=None)
    assert [due for due, name in core._timers if name == rid(2)] == [701 * MS]  # and no other
    assert only(send_all(core, MS)).deadline_ms == 700


def test_questions_are_asked_on_connection_and_answered_by_id() -> None:
    core = new_core()
    core.ask(rid(5), None, 1000, 0)
    assert send_all(core) == []
    core.on_connected()
    assert send_all(core) == [Describe(rid(5))]
    assert core.on_message(description(rid(6)), 0) == []
    done = only(core.on_message(description(rid(5)), 0))
    assert isinstance(done, Described)
    assert done.tasks["t"].deadline_ms == 300
    assert core.on_tick(1000 * MS) == []  # it has had its outcome


def test_waiting_for_tasks_asks_again_until_they_are_there() -> None:
    core = connected_core()
    core.ask(rid(5), ["t", "u"], 200, 0)
    send_all(core)
    assert core.on_message(description(rid(5)), 0) == []
    assert core.on_tick(50 * MS) == []
    assert send_all(core, 50 * MS) == [Describe(rid(5))]
    failed = only(core.on_tick(200 * MS))
    assert failed.error.code == "NOT_READY"
    assert "u" in failed.error.message


def test_who_has_no_time_to_ask_is_told_what_is_known() -> None:
    core = connected_core()
    core.ask(rid(5), None, 1000, 0)
    send_all(core)
    only(core.on_message(description(rid(5)), 0))
    core.ask(rid(6), ["t"], 0, MS)
    told = only(core.on_tick(MS))
    assert isinstance(told, Described) and set(told.tasks) == {"t"}
    core.ask(rid(7), ["u"], 0, MS)
    failed = only(core.on_tick(MS))
    assert failed.error.code == "NOT_READY" and failed.error.message.endswith(": u")


def test_a_question_that_nobody_waits_for_is_not_asked_again() -> None:
    core = connected_core()
    core.ask(rid(5), ["t", "u"], 3_600_000, 0)
    send_all(core)
    failed = only(core.cancel(rid(5)))
    assert (failed.request_id, failed.error.code) == (rid(5), "CANCELLED")
    assert core.cancel(rid(5)) == core.on_tick(50 * MS) == send_all(core, 50 * MS) == []


def test_a_question_without_an_answer_times_out() -> None:
    core = connected_core()
    core.on_message(description(UNASKED), 0)  # what is known already is no answer to it
    core.ask(rid(5), None, 2000, 0)
    send_all(core)
    assert core.on_tick(1999 * MS) == []
    assert only(core.on_tick(2000 * MS)).error.code == "TIMEOUT"


def test_a_broken_description_ends_its_question() -> None:
    core = connected_core()
    core.ask(rid(5), None, 200, 0)
    for task in ({}, {"name": 1}, {"name": "t", "path": 3, "contract": "x"}):
        msg = [encode_to_client(Description(rid(4), 1, (task,), {}))]
        assert core.on_message(msg, 0) == []
    msg = [encode_to_client(Description(rid(5), 1, ({},), {}))]
    assert only(core.on_message(msg, 0)).error.code == "MALFORMED_MESSAGE"


def test_one_error_for_the_whole_request_counts_for_each_task() -> None:
    core = connected_core()
    core.submit(rid(1), ("a", "b"), DESC, BODY, 1000, 0)
    send_all(core)
    error = make_error("OVERLOADED", "full", retry_after_ms=5)
    frames = [encode_to_client(Reply(rid(1), 0, (TaskResult("*", None, error, total_ns=7),)))]
    done = only(core.on_message(frames, 0))
    told = [(r.task, r.error.code, r.total_ns) for r in done.results]
    assert told == [("a", "OVERLOADED", 7), ("b", "OVERLOADED", 7)]
    assert done.results[0].error.retry_after_ms == 5


@pytest.mark.parametrize("task", ["other", "*"])
def test_a_reply_that_does_not_fit_ends_its_request(task: str) -> None:
    core = connected_core()
    submit(core, 1)
    send_all(core)
    failed = only(core.on_message(reply(1, task=task), 0))
    assert failed.error.code == "MALFORMED_MESSAGE"
    submit(core, 2)
    send_all(core)
    assert only(core.on_message(reply(2)[:1], 0)).error.code == "MALFORMED_MESSAGE"


def test_a_result_that_cannot_be_read_ends_its_request_at_once() -> None:
    """A tensor's dims lie deeper in it than anything in what a client sends."""
    core = connected_core()
    submit(core, 1)
    send_all(core)
    raw = decode(reply(1)[0], max_bytes=limits.MAX_CONTROL_BYTES, what="reply")
    raw[3] = "no epoch"
    failed = only(core.on_message([encode(raw), bytes(16)], 0))
    assert (failed.request_id, failed.error.code) == (rid(1), "MALFORMED_MESSAGE")


def test_close_ends_everything_and_leaves_the_cancels_to_send() -> None:
    core = connected_core()
    submit(core, 1)
    send_all(core)
    submit(core, 2)
    core.ask(rid(3), None, 1000, 0)
    ended = core.close()
    assert {o.request_id for o in ended} == {rid(1), rid(2), rid(3)}
    assert all(isinstance(o, Failed) and o.error.code == "CANCELLED" for o in ended)
    assert core.counters.failed == 2
    assert Cancel(rid(1)) in send_all(core)


def test_timers_do_not_pile_up() -> None:
    core = connected_core()
    submit(core, 5000, deadline_ms=60_000)
    core.ask(rid(5001), None, 60_000, 0)
    for n in range(1, 5000):
        submit(core, n, deadline_ms=60_000)
        send_all(core)
        core.on_message(reply(n), 0)
    assert len(core._timers) < 600
    late = core.on_tick(60_000 * MS + GRACE_NS)  # what has not ended is due all the same
    assert {o.request_id for o in late} == {rid(5000), rid(5001)}


def test_what_was_never_sent_does_not_pile_up_either() -> None:
    """A caller goes on and on while there is no Dispatcher."""
    core = new_core()
    for n in range(1, 5000):
        submit(core, n, now=n * MS, deadline_ms=1)
        assert only(core.on_tick((n + 1) * MS)).error.code == "DEADLINE_EXCEEDED"
    assert len(core._outbox) < 600
    submit(core, 5000, now=5000 * MS)
    core.cancel(rid(5000))
    submit(core, 5001, now=5000 * MS)
    core.on_connected()
    assert [r.request_id for r in send_all(core, 5000 * MS)] == [rid(5001)]
