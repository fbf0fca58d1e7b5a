"""The table of promises: each row finds its figure, judges it, and says so where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockflow.bench import overload_figures as overload
from blockflow.bench.chaos import report as chaos
from blockflow.bench.faultsim.judge import RULES
from blockflow.bench.fuzz import figures as fuzz
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.figures import counted, jain, timed
from blockflow.bench.reliability.page import BEGIN, END, fill, promise_table
from blockflow.bench.reliability.promises import (
    BENCH,
    CHAOS,
    COMMANDS,
    FAULTSIM,
    FUZZ,
    KILLS,
    NOT_MEASURED,
    OVERLOAD,
    PROMISES,
    SOAK,
    TOO_SHORT,
    UPDATES,
    Promise,
    find,
    promise_grid,
    within,
)
from blockflow.bench.results import Figure
from blockflow.bench.statistics import Verdict


def figure(
    name: str, mode: str, value: float, n: int = 1, unit: str = "1", **labels: object
) -> Figure:
    return Figure(name, mode, None, None, None, value, unit, n, labels=labels)


def bench_figures() -> list[Figure]:
    """Every promise that the benchmark measures is kept."""
    deaths = [
        timed(name, mode, [5.0, 6.0, 7.0])
        for name in (names.NOTICED, names.BEYOND_LOAD)
        for mode in (names.KILLED, names.STOPPED, names.STUCK, names.FROZEN)
    ]
    return [
        *deaths,
        timed(names.PROBE, "all", [3.0]),
        counted(names.PROBED, 4, 4),
        counted(names.AGAIN, 2, 2),
        counted(names.POISONED, 2, 2),
        counted(names.MATES, 14, 14),
        counted(names.DIED_OF_IT, 2, 2),
        timed(names.LATENESS, "all", [1.0, 2.0]),
        counted(names.NO_REPLY, 0, 20),
        timed(names.CANCELLED, "all", [1.0]),
        counted(names.IN_VAIN, 0, 10),
        counted(names.SMALLEST_SHARE, 0.9, 400),
        counted(names.JAIN, 0.99, 400),
        counted(f"{names.CUT_OFF} {names.BY_BYTES}", 4, 4),
        counted(f"{names.CUT_OFF} {names.BY_TIME}", 4, 4),
        timed(names.CUT_OFF, names.BY_BYTES, [60.0]),
        timed(names.CUT_OFF, names.BY_TIME, [2100.0]),
        replace(figure(names.OTHERS, names.BESIDE, 1.01, 8, "x", noise=0.02), low=1.0, high=1.05),
        figure(names.LEFT, names.AFTER_DEATHS, 0, 20, files=0, processes=0),
        figure(names.LEFT, names.AFTER_ALL, 0, 3),
    ]


def chaos_figures(killed: int = 1000) -> list[Figure]:
    zero = ("never ended", "ended twice", "no reply from a living dispatcher")
    return [
        figure(chaos.REQUESTS, "all", 5000, 5000),
        *(figure(chaos.REQUESTS, what, 0, 5000) for what in zero),
        figure(chaos.VIOLATIONS, "all", 0, 5000),
        figure(chaos.LEFT, "processes", 0),
        figure(chaos.LEFT, "files", 0),
        figure(chaos.HITS, "worker killed", killed - 9),
        figure(chaos.HITS, "manager killed", 9),
        timed(chaos.RECOVERY, chaos.MANAGER_BACK, [900.0, 1100.0]),
        replace(
            figure(
                chaos.GROWTH, "RSS, up", 1.0, 9, "MiB", tolerance=16.0, grows=False, seconds=2880
            ),
            low=-1.0,
            high=3.0,
        ),
    ]


def kept() -> dict[str, list[Figure]]:
    """Results of all commands, as they should be."""
    goodput = [
        figure(overload.GOODPUT, mode, rate, 900, "1/s", seconds=12.0)
        for mode, rate in (("1x", 100.0), ("3x", 99.5))
    ]
    rejection = replace(figure(overload.REJECTION, "3x", 1.0, 99, "ms"), p99_ms=4.0)
    memory = [figure(overload.MEMORY, "all", 100.0, 1, "MiB", at_s=t) for t in range(8)]
    return {
        BENCH: bench_figures(),
        CHAOS: chaos_figures(),
        KILLS: chaos_figures(),
        SOAK: chaos_figures(),
        OVERLOAD: [*goodput, rejection, *memory],
        UPDATES: [
            figure(name, "t", value)
            for name, value in (
                ("updates", 100),
                ("requests", 900),
                ("failed requests", 0),
                ("mixed requests", 0),
            )
        ],
        FUZZ: [
            figure(fuzz.FRAMES, "all", 999_950),
            figure(fuzz.FAILURES, "all", 0),
            figure(fuzz.GROWTH, "up", 6.0, 1, "MiB"),
        ],
        FAULTSIM: [
            figure("virtual time", "all", 24_000, 1000, "h"),
            figure("requests", "all", 1e6, 1000),
            figure("faults", "all", 1e5, 1000),
            figure("violations", "all", 0, 1000),
            *(figure("violations", rule, 0, 1000) for rule in RULES),
        ],
    }


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


@pytest.mark.parametrize(
    ("results", "broken"),
    [
        (BENCH, timed(names.NOTICED, names.KILLED, [500.0] * 6)),
        (BENCH, timed(names.BEYOND_LOAD, names.KILLED, [2000.0] * 6)),
        (BENCH, timed(names.NOTICED, names.STOPPED, [2000.0] * 6)),
        (BENCH, counted(names.AGAIN, 1, 2)),
        (BENCH, counted(names.PROBED, 3, 4)),
        (BENCH, counted(names.MATES, 13, 14)),
        (BENCH, counted(names.DIED_OF_IT, 3, 2)),
        (BENCH, timed(names.LATENESS, "all", [300.0] * 6)),
        (BENCH, counted(names.NO_REPLY, 1, 20)),
        (BENCH, counted(names.IN_VAIN, 1, 10)),
        (BENCH, counted(names.SMALLEST_SHARE, 0.4, 400)),
        (BENCH, counted(f"{names.CUT_OFF} {names.BY_TIME}", 3, 4)),
        (BENCH, replace(figure(names.OTHERS, names.BESIDE, 2.0, noise=0.1), low=1.8, high=2.1)),
        (BENCH, figure(names.LEFT, names.AFTER_DEATHS, 2, files=2)),
        (CHAOS, figure(chaos.REQUESTS, "never ended", 1, 5000)),
        (CHAOS, figure(chaos.LEFT, "files", 1)),
        (KILLS, figure(chaos.VIOLATIONS, "all", 1, 5000)),
        (KILLS, timed(chaos.RECOVERY, chaos.MANAGER_BACK, [9000.0] * 6)),
        (OVERLOAD, figure(overload.GOODPUT, "3x", 40.0, 900, seconds=12.0)),
        (UPDATES, figure("mixed requests", "t", 1)),
        (FUZZ, figure(fuzz.GROWTH, "dispatcher", 40.0)),
        (FAULTSIM, figure("violations", "all", 1, 1000)),
    ],
    ids=lambda v: v if isinstance(v, str) else f"{v.name}, {v.mode}",
)
def test_what_breaks_a_promise_is_missed(results: str, broken: Figure) -> None:
    stored = kept()
    stored[results] = [*stored[results], broken]  # a later figure of that name stands for it
    assert Verdict.MISSED in verdicts(stored).values()


def test_too_few_kills_prove_nothing() -> None:
    stored = {**kept(), KILLS: chaos_figures(killed=20)}
    (row,) = [p for p in PROMISES if p.name.startswith("1,000 kills")]
    found = find(row, stored)
    assert found is not None
    assert found.verdict == TOO_SHORT
    assert "11 x worker killed" in found.text


def test_growth_in_a_soak_is_missed() -> None:
    growing = [
        replace(f, labels={**f.labels, "grows": True}) if f.name == chaos.GROWTH else f
        for f in chaos_figures()
    ]
    assert verdicts({SOAK: growing})[f"{SOAK}: an hour of that: memory, descriptors"] == "missed"


def judged(samples: Sequence[float], goal_ms: float) -> str:
    promise = Promise("p", "t", BENCH, within("took", "all", goal_ms))
    found = find(promise, {BENCH: [timed("took", "all", samples)]})
    assert found is not None
    return found.verdict


def test_a_duration_is_judged_by_its_longest_and_missed_by_its_median() -> None:
    assert judged([10.0] * 10, 100.0) == Verdict.MET
    assert judged([10.0] * 9 + [150.0], 100.0) == Verdict.NOISE
    assert judged([150.0] * 9 + [10.0], 100.0) == Verdict.MISSED


def test_the_page_takes_the_table_between_its_marks() -> None:
    page = f"before\n{BEGIN}\n\nold\n\n{END}\nafter\n"
    once = fill(page, "new")
    assert once == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    assert fill(once, "new") == once
    with pytest.raises(ValueError, match="no place"):
        fill("no marks", "new")


def test_only_files_with_figures_are_named_below_the_table() -> None:
    text = promise_table({UPDATES: kept()[UPDATES]}, {UPDATES: "measured here"})
    assert text.endswith("<sub>measured here</sub>")
    assert "100 updates, 900 requests: 0 failed, 0 mixed" in text
    assert text.count("<sub>") == 1


def test_jains_index() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([6.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([0.0]) == 0.0
