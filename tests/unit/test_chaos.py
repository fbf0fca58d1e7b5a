"""Chaos: the plan of faults, the clients' ledger and what the report makes of it."""

from __future__ import annotations

from rich.console import Console

from blockflow.bench.chaos.faults import Injected
from blockflow.bench.chaos.ledger import OK, WRONG, Ledger
from blockflow.bench.chaos.plan import KINDS, plan_faults
from blockflow.bench.chaos.report import (
    GRACE_S,
    Findings,
    draw,
    fault_table,
    figures,
    outcome_table,
    recoveries,
    violation_lines,
)
from blockflow.bench.chaos.watch import MemorySample


def ledger(*ends: tuple[str, float, float, str]) -> Ledger:
    """Requests with a deadline of 1 s: task, sent, done, outcome."""
    out = Ledger()
    for number, (task, sent, done, outcome) in enumerate(ends):
        out.sent(number, task, sent, 1.0)
        out.done(number, outcome, done)
    return out


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


def test_a_request_that_never_ends_is_missing() -> None:
    book = ledger(("a", 0.0, 0.1, OK))
    book.sent(7, "a", 0.2, 1.0)
    assert (book.sent_count, book.missing) == (2, 1)
    assert Findings(book).violations() == ["1 requests never ended"]


def test_a_second_end_is_noticed() -> None:
    book = ledger(("a", 0.0, 0.1, OK))
    book.done(0, OK, 0.2)
    assert Findings(book).violations() == ["1 requests ended twice"]


def test_lateness_is_judged_with_the_machines_own_lag() -> None:
    book = ledger(("a", 0.0, 1.0 + GRACE_S + 0.05, "DEADLINE_EXCEEDED"))
    assert Findings(book).violations() == ["1 requests ended later than their deadline allows"]
    assert not Findings(book, lag_s=0.1).violations()


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


def test_a_manager_that_nobody_follows_is_a_violation() -> None:
    found = Findings(ledger(), readopted=[0.5, float("inf"), 0.7])
    assert found.violations() == ["1 times no new manager took over"]
    assert recoveries(found) == {"manager killed: taken over": [0.5, 0.7]}


def test_figures_tables_and_picture_of_a_run() -> None:
    book = ledger(("a", 0.0, 0.1, OK), ("a", 0.5, 0.6, "OVERLOADED"), ("b", 1.1, 1.3, OK))
    found = Findings(
        book,
        [Injected(1.0, "worker killed", ("b",), ""), Injected(1.2, "system update", (), "")],
        [MemorySample(t / 2, 100 << 20, 1 << 20, 5, 80) for t in range(8)],
    )
    made = {(f.name, f.mode): f.value for f in figures(found)}
    assert made["requests", "all"] == 3
    assert made["requests", "OVERLOADED"] == 1
    assert made["faults", "worker killed"] == 1
    assert round(made["recovery", "worker killed"]) == 300
    assert made["RSS", "last quarter"] == 100
    assert made["violations", "all"] == 0
    console = Console(record=True, width=100)
    console.print(outcome_table(found), fault_table(found))
    text = console.export_text()
    assert "OVERLOADED" in text
    assert "worker killed" in text
    assert len(draw(found).axes) == 2
