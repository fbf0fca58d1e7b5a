"""Chaos: the plan of faults, the clients' ledger and what the report makes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from chaos_rig import ledger, rid

from blockflow.bench.chaos.faults import Injected, Takeover
from blockflow.bench.chaos.findings import GRACE_S, OUTAGE_S, Findings
from blockflow.bench.chaos.kills import PER_MINUTE, Turns
from blockflow.bench.chaos.lag import Lag, LagBook
from blockflow.bench.chaos.ledger import (
    LATE,
    NO_REPLY,
    OK,
    POISON,
    WRONG,
    Ledger,
)
from blockflow.bench.chaos.load import code_of
from blockflow.bench.chaos.plan import KINDS, LASTING, Kind, plan_faults
from blockflow.bench.chaos.report import (
    ABANDONED,
    AWAY,
    SERVED,
    UNSERVED,
    figures,
    recoveries,
    violation_lines,
)
from blockflow.bench.chaos.report import LATE as LATER
from blockflow.bench.chaos.run import parse_args, status_of
from blockflow.bench.chaos.wire import WireTap
from blockflow.client.request import Pending, expired
from blockflow.core.errors import RequestError
from blockflow.wire.client import Reply, Request, encode_to_client, encode_to_dispatcher
from blockflow.wire.tensor import TensorDesc


def test_a_plan_is_its_seeds() -> None:
    one, same, other = (plan_faults(s, 100.0, 2.0) for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_every_kind_comes_before_any_comes_again() -> None:
    plan = plan_faults(3, 1000.0, 2.0)
    assert {f.kind for f in plan[: len(KINDS)]} == set(KINDS)
    assert len(plan) > 2 * len(KINDS)


def test_the_ends_of_a_run_are_quiet() -> None:
    times = [f.at_s for f in plan_faults(1, 60.0, 0.5, quiet_s=5.0)]
    assert 5.0 < min(times) < max(times) < 55.0
    assert times == sorted(times)


def test_a_part_of_a_run_spares_who_lives_as_long_as_the_system() -> None:
    plan = plan_faults(1, 1000.0, 1.0, spare=0.5)
    early = {f.kind.name for f in plan if f.at_s < 500.0}
    late = {f.kind.name for f in plan if f.at_s >= 500.0}
    assert early == {k.name for k in KINDS}
    assert late == early - LASTING
    only = [k for k in KINDS if k.name in LASTING]
    assert max(f.at_s for f in plan_faults(1, 100.0, 1.0, only, spare=0.2)) < 80.0


def test_a_request_that_never_ends_is_missing() -> None:
    book = ledger()
    book.sent(rid(200), "a", 0.2, 1.0)
    assert (book.sent_count, book.missing) == (101, 1)
    assert Findings(book).violations() == ["1 requests never ended"]


def test_a_reply_too_many_is_an_end_too_many() -> None:
    book = ledger()
    book.replied(rid(0), 1, 0.2)
    assert Findings(book).violations() == ["1 requests ended twice"]
    book.replied(rid(999), 1, 0.3)  # to nobody
    book.done(rid(1), OK, 0.3)
    assert book.doubled == 3


def test_what_is_sent_again_may_be_answered_again_but_not_twice() -> None:
    book = ledger(good=0)
    book.sent(rid(0), "a", 0.0, 1.0)
    book.carried(rid(0), 1)
    book.carried(rid(0), 2)  # the first connection broke, and with it what had been asked there
    book.replied(rid(0), 2, 0.1)
    assert book.doubled == 0
    book.replied(rid(0), 2, 0.2)
    book.replied(rid(0), 1, 0.2)
    assert book.doubled == 2
    book.sent(rid(1), "a", 0.0, 1.0)
    book.carried(rid(1), 2)
    book.replied(rid(1), 2, 0.1)  # its slot was lost
    book.carried(rid(1), 2)
    book.replied(rid(1), 2, 0.2)
    assert book.doubled == 2


def test_a_late_reply_is_that_of_its_own_request() -> None:
    book = ledger(("a", 1.0, 2.1, NO_REPLY), ("a", 1.0, 2.1, NO_REPLY))
    book.replied(rid(1), 1, 2.6)
    assert (book.silent, book.outcomes()[LATE]) == (1, 1)
    found = Findings(book, lag=held_up((2.0, 2.01)))
    assert found.lost == 1
    assert found.slow() == ["1 requests ended later than their deadline allows"]
    assert book.worst_s() == pytest.approx(0.6)


def test_a_run_of_refusals_serves_nobody() -> None:
    (said,) = Findings(ledger(*[("a", 0.0, 0.1, "NOT_READY")] * 11, good=89)).broken()
    assert said == "only 89.0% of 100 requests were answered with a result"
    assert Findings(ledger(*[("a", 0.0, 0.1, "NOT_READY")] * 10, good=90)).broken() == []
    assert Findings(Ledger()).broken() != []  # nothing was asked, nothing is shown


def test_only_lateness_is_worth_another_run() -> None:
    late = ledger(("a", 0.0, 1.0 + GRACE_S + 0.05, "DEADLINE_EXCEEDED"))
    assert status_of(Findings(ledger())) == 0
    assert status_of(Findings(late)) == os.EX_TEMPFAIL
    assert status_of(Findings(late, survivors=["12 worker"])) == 1
    assert status_of(Findings(ledger(("a", 0.0, 0.1, WRONG)))) == 1


def held_up(*spans: tuple[float, float]) -> LagBook:
    """A machine that let a thread wait from then until then."""
    book = LagBook()
    for due_s, woken_s in spans:
        book.note(due_s, woken_s)
    return book


TOO_LATE = ["1 requests ended later than their deadline allows"]


def test_lateness_is_judged_with_the_machines_own_lag() -> None:
    book = ledger(("a", 0.0, 1.0 + GRACE_S + 0.05, "DEADLINE_EXCEEDED"))
    assert Findings(book).violations() == TOO_LATE
    assert not Findings(book, lag=held_up((0.95, 1.05))).violations()
    assert Findings(book, lag=held_up((1.0, 1.04))).violations() == TOO_LATE  # not so late


def test_a_hiccup_excuses_what_came_around_it_and_nothing_else() -> None:
    """It lasted for 2.5 s: who was due then could not be in time; who was due an hour later, or
    before, could."""
    hiccup = held_up((0.5, 0.51), (100.0, 102.5), (200.0, 200.01))
    for sent, excused in ((98.0, True), (100.0, True), (102.0, True), (103.0, False)):
        book = ledger(("a", sent, sent + 1.0 + GRACE_S + 1.5, "DEADLINE_EXCEEDED"))
        assert Findings(book, lag=hiccup).slow() == ([] if excused else TOO_LATE), sent
    for sent in (0.0, 96.0, 3700.0):
        book = ledger(("a", sent, sent + 1.0 + GRACE_S + 0.5, "DEADLINE_EXCEEDED"))
        found = Findings(book, lag=hiccup)
        assert found.slow() == TOO_LATE
        made = {(f.name, f.mode): f.value for f in figures(found)}
        assert made["lag", "worst"] == 2500.0
        assert made[LATER, "beyond the machine's lag"] == 1
    both = ledger(*[("a", sent, sent + 2.6, "DEADLINE_EXCEEDED") for sent in (100.0, 3700.0)])
    made = {(f.name, f.mode): f.value for f in figures(Findings(both, lag=hiccup))}
    assert (made[LATER, "all"], made[LATER, "beyond the machine's lag"]) == (2, 1)


def test_lag_is_noted_with_when_it_was() -> None:
    """On a clock that jumps once: the thread was asleep for so long, as far as it can tell."""
    jumped = threading.Event()

    def clock() -> float:
        return time.monotonic() + 60.0 * jumped.is_set()

    begin = time.monotonic()
    lag = Lag(clock)
    jumped.set()
    while lag._book.worst_s < 59.0:
        time.sleep(0.001)
    book = lag.stop()
    end = time.monotonic() + 60.0
    assert book.worst_s == book.between(begin, end) > 59.0
    assert book.between(begin - 10.0, begin - 1.0) == book.between(end + 1.0, end + 9.0) == 0.0


def test_faults_excuse_some_outcomes_and_no_others() -> None:
    book = ledger(
        ("a", 0.0, 0.1, "OVERLOADED"), ("a", 0.0, 0.1, "INTERNAL"), ("a", 0.0, 0.1, WRONG)
    )
    assert Findings(book).violations() == [
        "1 requests ended with INTERNAL",
        "1 requests ended with wrong value",
    ]


def test_what_is_left_behind_is_a_violation() -> None:
    found = Findings(ledger(), survivors=["12 worker"], files=["/dev/shm/x"], recovered=False)
    assert len(found.violations()) == 3
    assert all(line.startswith("BROKEN") for line in violation_lines(found.violations()))


def test_recovery_counts_from_the_fault_to_the_first_answer_of_a_later_request() -> None:
    book = ledger(
        ("a", 0.9, 1.5, OK),  # was under way when it happened
        ("a", 1.1, 1.3, "WORKER_LOST"),
        ("a", 1.2, 1.8, OK),
        ("b", 1.1, 1.2, OK),
    )
    found = Findings(book, [Injected(1.0, "worker killed", ("a",), "a#0")])
    assert [round(s, 6) for s in recoveries(found)["worker killed"]] == [0.8]


def test_recovery_is_that_of_the_first_answer_not_of_the_first_request() -> None:
    recovery_s = ledger(("a", 1.0, 9.0, OK), ("a", 2.0, 3.0, OK)).recoveries()
    assert (recovery_s("a", 1.0), recovery_s("a", 2.5), recovery_s("b", 0.0)) == (2.0, None, None)


LOST = "1 requests got no reply, though somebody was there to reply"


def killed(at_s: float, kind: str = "dispatcher killed") -> Injected:
    return Injected(at_s, kind, ("a",), "")


@pytest.mark.parametrize("outcome", [NO_REPLY, "CONNECTION_LOST", "NOT_RUNNING"])
def test_who_ends_alone_is_lost_unless_there_was_no_dispatcher(outcome: str) -> None:
    """The new one answers half a second after the death; what came up meanwhile takes another."""
    before, again = ("a", 48.1, 48.2, OK), ("a", 50.1, 50.5, OK)
    book = ledger(("a", 50.0, 51.05, outcome), before, again)
    assert Findings(book).violations() == [LOST]
    assert not Findings(book, [killed(50.0)]).violations()
    assert Findings(book, [killed(48.0)]).violations() == [LOST]  # that was over long before
    assert Findings(book, [killed(51.1)]).violations() == [LOST]  # and that came later
    assert Findings(book, [killed(50.0, "worker killed")]).violations() == [LOST]
    nobody_hit = Injected(50.0, "dispatcher killed", (), "not done")
    assert Findings(book, [nobody_hit]).violations() == [LOST]


def test_no_dispatcher_is_away_for_long() -> None:
    book = ledger(("a", 50.0, 50.0 + OUTAGE_S + 2.0, NO_REPLY))
    assert Findings(book, [killed(50.0)], grace_s=60.0).violations() == [LOST]


def test_poison_takes_two_deaths_on_the_way() -> None:
    book = ledger(("a", 50.0, 51.0, POISON))
    once = [Injected(50.1, "worker killed", ("a", "b"), "")]
    assert Findings(book, once).violations() == ["1 requests were blamed without two deaths"]
    twice = [*once, Injected(50.6, "worker killed at work", ("a",), "")]
    assert not Findings(book, twice).violations()
    other = [*once, Injected(50.6, "worker killed at work", ("b",), "")]
    assert Findings(book, other).violations()


def test_the_clients_own_deadline_is_told_from_a_reply() -> None:
    waited = expired(Pending(b"\x01" * 16, ("a",), TensorDesc("float32", (1,)), b"", 0, 0, True))
    assert code_of(waited) == NO_REPLY
    assert code_of(RequestError("DEADLINE_EXCEEDED", "no result within 5 ms")) != NO_REPLY
    assert code_of(ValueError("a defect")) == "ValueError"


def test_a_second_reply_on_one_connection_is_one_too_many() -> None:
    """Sent again on the next one it may be answered there; nothing comes on the first any more."""
    book = Ledger()
    tap = WireTap(book, threading.Lock(), lambda: 10.0)
    request = Request(rid(0), ("a",), 1000, TensorDesc("float32", (1, 1)))
    reply = memoryview(encode_to_client(Reply(rid(0), 1, ())))
    for doubled in (1, 2):
        tap.connected()
        tap.sent(encode_to_dispatcher(request))
        for _ in range(2):
            tap.received(reply)
        tap.disconnected()
        assert book.doubled == doubled
    tap.received(memoryview(b"nonsense"))
    assert (book.doubled, book.garbled) == (2, 1)
    assert "1 messages to clients made no sense" in Findings(book).broken()


def test_a_manager_that_nobody_follows_is_a_violation() -> None:
    took = [Takeover(10.0 * n, s, 9) for n, s in enumerate((0.5, float("inf"), 0.7))]
    found = Findings(ledger(), takeovers=took)
    assert found.violations() == ["1 times no new manager took over"]
    assert recoveries(found) == {"manager killed: taken over": [0.5, 0.7]}
    made = {(f.name, f.mode): (f.value, f.n) for f in figures(found)}
    assert made[SERVED, ABANDONED] == (1.0, 3)


def test_serving_goes_on_while_the_manager_is_away_or_it_is_told() -> None:
    """Counted are those that had half of the gap at least to be answered in it."""
    book = ledger(
        ("a", 10.1, 10.2, OK),
        ("a", 10.2, 11.1, OK),  # served by the successor
        ("a", 10.9, 11.3, OK),  # sent too late to tell
        ("a", 20.1, 22.5, OK),
    )
    gaps = [Takeover(at, took, 9) for at, took in ((10.0, 1.0), (20.0, 2.0), (30.0, 1.0))]
    made = {(f.name, f.mode): (f.value, f.n) for f in figures(Findings(book, takeovers=gaps))}
    assert made[SERVED, AWAY] == (1.0, 3)
    assert made[SERVED, UNSERVED] == (1.0, 3)  # nobody asked in the third


# --- CI -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lint", "collection", "first", "then", "status", "runs"),
    [
        (0, 0, 0, 9, 0, 1),
        (0, 0, 75, 0, 0, 2),
        (0, 0, 75, 1, 1, 2),
        (0, 0, 1, 0, 1, 1),
        (2, 0, 0, 0, 2, 0),
        (0, 4, 0, 0, 4, 0),
    ],
)
def test_ci_runs_chaos_again_for_lateness_alone_and_not_on_what_is_broken(
    tmp_path: Path, lint: int, collection: int, first: int, then: int, status: int, runs: int
) -> None:
    """With stand-ins for make and the interpreter: the script is what is tested."""
    root = Path(__file__).resolve().parents[2]
    calls = tmp_path / "calls"
    calls.touch()
    python = (
        f'#!/bin/sh\ncase "$*" in *--collect-only*) exit {collection};; esac\n'
        f'echo x >> {calls}\n[ "$(wc -l < {calls})" = 1 ] && exit {first}\nexit {then}\n'
    )
    make = f'#!/bin/sh\n[ "$1" = lint ] && exit {lint}\nexit 0\n'
    for name, text in ((".venv/bin/python", python), ("bin/make", make)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci" / "run", tmp_path / ".ci" / "run")
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=env, check=False, capture_output=True)
    assert done.returncode == status
    assert len(calls.read_text(encoding="utf-8").splitlines()) == runs
    assert (b"RERUN chaos" in done.stdout) == (runs == 2)


# --- kills ----------------------------------------------------------------------------------------


def test_all_that_kill_take_turns_and_a_lone_process_rests() -> None:
    kinds = [*KINDS, Kind("manager killed", 1, kills=True)]  # whatever is added takes part
    turns = Turns(kinds)
    first = [turns.take(float(n)) for n in range(len(turns))]
    names = [k.name for k in first if k is not None]
    assert names == [k.name for k in kinds if "killed" in k.name]
    for _ in range(40):
        turns.take(10.0)
    more = [turns.take(11.0) for _ in range(6)]
    assert {k.name for k in more if k is not None} == {"worker killed", "worker killed at work"}
    after = [turns.take(80.0) for _ in range(len(turns))]
    assert {k.name for k in after if k is not None} == set(names)
    assert PER_MINUTE < 5


def test_whoever_has_nobody_to_kill_waits() -> None:
    turns = Turns([Kind("worker killed", 1, kills=True)])
    kind = turns.take(0.0)
    assert kind is not None
    turns.give_back(kind, 0.0)
    assert turns.take(0.5) is None
    assert turns.take(1.5) is kind


@pytest.mark.parametrize(
    ("arguments", "name"),
    [([], "chaos"), (["--kills", "20"], "kills"), (["--target=soak"], "soak")],
)
def test_each_kind_of_run_has_files_of_its_own(arguments: list[str], name: str) -> None:
    args, kinds = parse_args(arguments)
    assert (args.json, args.plot) == (f"results/{name}.jsonl", f"results/{name}.png")
    assert kinds == list(KINDS)
    with pytest.raises(SystemExit):
        parse_args(["--kills", "5", "--only", "CPU burners"])
