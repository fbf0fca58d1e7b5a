"""The table of promises: each row finds its figure, judges it, and says so where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from promises_rig import beside, chaos_figures, depth, figure, growing, kept, left

from blockflow.bench import overload_figures as overload
from blockflow.bench.chaos import report as chaos
from blockflow.bench.chaos.growth import ONE_LIFE
from blockflow.bench.fuzz import figures as fuzz
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.figures import counted, timed
from blockflow.bench.reliability.page import promise_table
from blockflow.bench.reliability.promise import (
    NOT_MEASURED,
    TOO_SHORT,
    Book,
    Promise,
    find,
    missed,
    within,
)
from blockflow.bench.reliability.promises import (
    BENCH,
    COMMANDS,
    KILLS,
    OVERLOAD,
    PROMISES,
    SOAK,
    UPDATES,
    promise_grid,
)
from blockflow.bench.results import Figure
from blockflow.bench.statistics import Verdict


def verdicts(stored: dict[str, list[Figure]]) -> dict[str, str]:
    found = ((p, find(p, stored)) for p in PROMISES)
    return {f"{p.results}: {p.name}": "" if f is None else str(f.verdict) for p, f in found}


def test_what_keeps_every_promise_is_met() -> None:
    assert set(verdicts(kept()).values()) == {Verdict.MET}


def test_without_results_every_row_says_so() -> None:
    grid = promise_grid({})
    assert len(grid.rows) == len(PROMISES)
    assert {row[2] for row in grid.rows} == {NOT_MEASURED}
    assert {row[4] for row in grid.rows} == {f"`{c}`" for c in COMMANDS.values()}


LATE = timed(names.LATENESS, "all", [0.0] * 19 + [300.0])
MISSES: dict[str, list[list[Figure]]] = {
    "a worker that is killed is noticed": [[timed(names.NOTICED, names.KILLED, [500.0] * 6)]],
    "... and replaced": [[timed(names.BEYOND_LOAD, names.KILLED, [2000.0] * 6)]],
    "a stopped worker is noticed": [[timed(names.NOTICED, names.STOPPED, [2000.0] * 6)]],
    "one that lives and says nothing is noticed by its heartbeat": [
        [timed(names.NOTICED, names.FROZEN, [1500.0] * 6)]
    ],
    "a forward that does not end is ended, beyond the block's `timeout_ms` by": [
        [timed(names.NOTICED, names.STUCK, [1500.0] * 6)]
    ],
    "requests of workers that hang": [[counted(names.AGAIN, 1, 2)]],
    "a worker that crashes again and again": [
        *([counted(names.CRASHES, many, 5)] for many in (4, 10)),
        *([counted(what, 0, 1)] for what in (names.STAYS, names.REFUSED)),
        [counted(names.BYSTANDERS, 399, 400)],
    ],
    "a load failure": [
        [counted(names.LOADS, 1 + stays, 1, {"stays": stays})] for stays in (True, False)
    ],
    "1,000 kills over all roles under load": [
        [figure(chaos.REQUESTS, "never ended", 1, 5000)],
        [figure(chaos.REQUESTS, "ended twice", 1, 5000)],
        [figure(chaos.REQUESTS, "no reply from a living dispatcher", 1, 5000)],
        [figure(chaos.VIOLATIONS, "all", 1, 5000)],
    ],
    "all faults at once": [
        [figure(chaos.REQUESTS, "never ended", 1, 5000)],
        [figure(chaos.REQUESTS, "ended twice", 1, 5000)],
        [figure(chaos.REQUESTS, "no reply from a living dispatcher", 1, 5000)],
        [figure(chaos.VIOLATIONS, "all", 1, 5000)],
    ],
    "an hour of that: memory, descriptors": [
        [growing(mode, True)] for mode in ("descriptors per process", f"RSS, dispatcher{ONE_LIFE}")
    ],
    "poison is blamed alone": [
        [counted(names.POISONED, 1, 2)],
        [counted(names.MATES, 13, 14)],
        [counted(names.DIED_OF_IT, 3, 2)],
    ],
    "a reply comes by its deadline": [
        [LATE, counted(names.OVERDUE, 1, 20)],
        [LATE, counted(names.OVERDUE, 9, 20, {"beyond_lag": 1})],
        [counted(names.NO_REPLY, 1, 20)],
    ],
    "no block starts an expired request": [[figure("violations", "nothing starts late", 1, 1000)]],
    "cancelled requests that are computed": [[counted(names.IN_VAIN, 1, 10)]],
    "goodput at three times the capacity": [
        [figure(overload.GOODPUT, "3x", 40.0, 900, seconds=12.0)]
    ],
    "rejections at three times the capacity": [
        [replace(figure(overload.REJECTION, "3x", 1.0, 99, "ms"), p99_ms=25.0)]
    ],
    "memory under overload": [
        [figure(overload.MEMORY, "all", 120.0, 1, "MiB", at_s=t) for t in range(8, 16)]
    ],
    "queues under overload": [
        [depth(overload.IN_FLIGHT, "3x", 11.0, 30.0)],  # it grows along the load
        [depth(overload.QUEUED, "3x", 11.0, 30.0)],
        [depth(overload.IN_FLIGHT, "3x", 40.0, 40.0)],  # and with it
    ],
    "clients that ask for 0.5, 0.5, 1 and 2 times the capacity": [
        [counted(names.SMALLEST_SHARE, 0.4, 400)]
    ],
    "a client that does not read is cut off": [
        [counted(f"{names.CUT_OFF} {names.BY_BYTES}", 3, 4)],
        [counted(f"{names.CUT_OFF} {names.BY_TIME}", 3, 4)],
        [timed(names.CUT_OFF, names.BY_BYTES, [2600.0] * 6)],
        [timed(names.CUT_OFF, names.BY_TIME, [2600.0] * 6)],
    ],
    "... and the others' p99": [[beside(2.0, noise=0.1)], [beside(1.5)]],
    "left over after single deaths": [
        *([left(mode, descriptors=1)] for mode in (names.AFTER_DEATHS, *names.ROLES)),
        [left(names.AFTER_DEATHS, files=2)],
        [left(names.ROLES[0], segments=1)],
    ],
    "left over at the next start after everything was killed": [
        [figure(names.LEFT, names.AFTER_ALL, 1, 3)]
    ],
    "left over after a chaos run": [
        [figure(chaos.LEFT, "files", 1)],
        [figure(chaos.LEFT, "processes", 1)],
    ],
    "updates under load": [
        [figure("failed requests", "t", 1)],
        [figure("mixed requests", "t", 1)],
    ],
    "a new manager takes the workers over": [
        [timed(chaos.RECOVERY, chaos.MANAGER_BACK, [9000.0] * 6)],
        [figure(chaos.SERVED, chaos.ABANDONED, 1, 9)],
        [figure(chaos.SERVED, chaos.UNSERVED, 1, 9)],
        [figure(chaos.SERVED, chaos.AWAY, 500, 1000, "requests")],
    ],
    "malformed frames": [
        [figure(fuzz.FAILURES, "all", 1)],
        [figure(fuzz.GROWTH, "dispatcher", 40.0)],
    ],
    "published workers that a probe had passed through": [[counted(names.PROBED, 3, 4)]],
    "invariants under virtual time": [[figure("violations", "all", 1, 1000)]],
}
"""Of each row, the figures that break it: each list by itself."""


def test_every_row_has_a_planted_miss() -> None:
    assert MISSES.keys() == {p.name for p in PROMISES}


@pytest.mark.parametrize(
    ("promise", "planted"),
    [
        pytest.param(p, planted, id=f"{p.name}: {planted[0].name}, {planted[0].mode}")
        for p in PROMISES
        for planted in MISSES.get(p.name, [])
    ],
)
def test_a_planted_miss_is_missed_by_its_row_alone(promise: Promise, planted: list[Figure]) -> None:
    stored = kept()
    # A later figure of a name stands for it.
    stored[promise.results] = [*stored[promise.results], *planted]
    found = verdicts(stored)
    missed_rows = [row for row, verdict in found.items() if verdict != Verdict.MET]
    assert missed_rows == [f"{promise.results}: {promise.name}"]
    assert found[missed_rows[0]] == Verdict.MISSED
    _, broken = missed(PROMISES, promise.results, stored[promise.results])
    assert broken


def test_results_without_a_miss_are_no_reason_to_fail() -> None:
    for results, found in kept().items():
        lines, broken = missed(PROMISES, results, found)
        assert len(lines) == sum(p.results == results for p in PROMISES)
        assert not broken


def test_what_should_have_been_measured_and_was_not_is_a_reason() -> None:
    queues = (overload.IN_FLIGHT, overload.QUEUED)
    lines, broken = missed(
        PROMISES, OVERLOAD, [f for f in kept()[OVERLOAD] if f.name not in queues]
    )
    assert f"{NOT_MEASURED}: queues under overload (flat (x <= 1.5))" in lines
    assert broken


def test_what_the_machine_was_late_itself_is_no_miss() -> None:
    stored = kept()
    stored[BENCH] += [LATE, counted(names.OVERDUE, 1, 20, {"beyond_lag": 0})]
    assert verdicts(stored)[f"{BENCH}: a reply comes by its deadline"] == Verdict.NOISE


def test_the_machines_worst_moment_excuses_no_other() -> None:
    """It was late by a minute once, and not when this reply came."""
    stored = kept()
    lag = figure("lag", "worst", 60_000.0, 1, "ms")
    stored[BENCH] += [LATE, counted(names.OVERDUE, 1, 20, {"beyond_lag": 1}), lag]
    assert verdicts(stored)[f"{BENCH}: a reply comes by its deadline"] == Verdict.MISSED


@pytest.mark.parametrize(
    ("beyond", "verdict"), [(4.0, Verdict.NOISE), (12.0, Verdict.MISSED), (None, Verdict.MISSED)]
)
def test_late_rejections_may_be_the_machines_doing(beyond: float | None, verdict: Verdict) -> None:
    stored = kept()
    labels = {} if beyond is None else {"beyond_lag": beyond}
    rejection = figure(overload.REJECTION, "3x", 1.0, 99, "ms", **labels)
    others = [f for f in stored[OVERLOAD] if f.name != overload.REJECTION]
    stored[OVERLOAD] = [*others, replace(rejection, p99_ms=25.0)]
    assert verdicts(stored)[f"{OVERLOAD}: rejections at three times the capacity"] == verdict


@pytest.mark.parametrize("unfair", [{"reader_mib": 20.0}, {"reader_cut": 1}, {"other_cut": 0.5}])
def test_beside_a_heavier_neighbour_nothing_is_shown(unfair: dict[str, float]) -> None:
    """One that receives much more may do as much harm itself; one that is cut off does."""
    stored = kept()
    stored[BENCH] += [beside(0.7, **unfair)]
    assert verdicts(stored)[f"{BENCH}: ... and the others' p99"] == Verdict.NOISE


def test_one_slow_takeover_is_told_and_not_hidden_in_a_percentile() -> None:
    stored = kept()
    stored[KILLS].append(timed(chaos.RECOVERY, chaos.MANAGER_BACK, [900.0] * 500 + [6000.0]))
    (row,) = [p for p in PROMISES if p.name == "a new manager takes the workers over"]
    found = find(row, stored)
    assert found is not None
    assert "at most 6.00" in found.text
    assert found.verdict == Verdict.NOISE


def test_too_few_kills_prove_nothing() -> None:
    stored = {**kept(), KILLS: chaos_figures(killed=20)}
    (row,) = [p for p in PROMISES if p.name.startswith("1,000 kills")]
    found = find(row, stored)
    assert found is not None
    assert found.verdict == TOO_SHORT
    assert "11 x worker killed" in found.text


def test_an_hour_in_which_the_dispatcher_was_replaced_all_the_time_shows_no_slow_leak() -> None:
    stored = {**kept(), SOAK: [growing("RSS, up", False)]}
    assert verdicts(stored)[f"{SOAK}: an hour of that: memory, descriptors"] == TOO_SHORT


def judged(samples: Sequence[float], goal_ms: float) -> str:
    promise = Promise("p", "t", BENCH, within("took", "all", goal_ms))
    found = find(promise, {BENCH: [timed("took", "all", samples)]})
    assert found is not None
    return found.verdict


def test_a_duration_is_judged_by_its_longest_and_missed_by_its_median() -> None:
    assert judged([10.0] * 10, 100.0) == Verdict.MET
    assert judged([10.0] * 9 + [150.0], 100.0) == Verdict.NOISE
    assert judged([150.0] * 9 + [10.0], 100.0) == Verdict.MISSED


def test_an_interval_that_begins_at_nothing_is_one() -> None:
    most = timed("took", "all", [0.0] * 3 + [150.0] * 4)
    assert most.low == 0.0
    found = within("took", "all", 100.0)(Book([most]))
    assert found.verdict == Verdict.NOISE
    assert "(0-150)" in found.text


def test_only_files_with_figures_are_named_below_the_table() -> None:
    text = promise_table({UPDATES: kept()[UPDATES]}, {UPDATES: "measured here"})
    assert text.endswith("<sub>measured here</sub>")
    assert "100 updates, 900 requests: 0 failed, 0 mixed" in text
    assert text.count("<sub>") == 1
