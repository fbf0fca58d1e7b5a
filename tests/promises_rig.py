"""Figures of all commands that keep every promise, and builders of single ones."""

from __future__ import annotations

from dataclasses import replace

from blockflow.bench import overload_figures as overload
from blockflow.bench.chaos import report as chaos
from blockflow.bench.chaos.growth import ONE_LIFE
from blockflow.bench.faultsim.judge import RULES
from blockflow.bench.fuzz import figures as fuzz
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.figures import counted, timed
from blockflow.bench.reliability.promises import (
    BENCH,
    CHAOS,
    FAULTSIM,
    FUZZ,
    KILLS,
    OVERLOAD,
    SOAK,
    UPDATES,
)
from blockflow.bench.results import Figure


def figure(
    name: str, mode: str, value: float, n: int = 1, unit: str = "1", **labels: object
) -> Figure:
    return Figure(name, mode, None, None, None, value, unit, n, labels=labels)


def left(mode: str, **more: int) -> Figure:
    nothing = {"files": 0, "segments": 0, "processes": 0, "descriptors": 0}
    return figure(names.LEFT, mode, sum(more.values()), 3, **{**nothing, **more})


def depth(name: str, mode: str, first: float, second: float) -> Figure:
    return figure(name, mode, second, 36, **{"first half": first, "max": second + 3})


def growing(name: str, grows: bool) -> Figure:
    value = 60.0 if grows else 1.0
    made = figure(chaos.GROWTH, name, value, 9, "MiB", tolerance=16.0, grows=grows, seconds=2880)
    return replace(made, low=value - 2.0, high=value + 2.0)


def beside(ratio: float, **labels: float) -> Figure:
    fair = {"noise": 0.02, "reader_mib": 3.5, "other_mib": 3.5, "reader_cut": 0, "other_cut": 1.0}
    made = figure(names.OTHERS, names.BESIDE, ratio, 8, "x", **{**fair, **labels})
    return replace(made, low=ratio - 0.01, high=ratio + 0.01)


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
        counted(names.CRASHES, 5, 5),
        counted(names.STAYS, 1, 1),
        counted(names.REFUSED, 1, 1),
        counted(names.LOADS, 1, 1, {"stays": True}),
        counted(names.BYSTANDERS, 400, 400),
        counted(names.POISONED, 2, 2),
        counted(names.MATES, 14, 14),
        counted(names.DIED_OF_IT, 2, 2),
        timed(names.LATENESS, "all", [0.0, 1.0, 2.0]),
        counted(names.AFTERWARDS, 2, 20),
        counted(names.OVERDUE, 0, 20),
        figure("lag", "worst", 5.0, 1, "ms"),
        counted(names.NO_REPLY, 0, 20),
        timed(names.CANCELLED, "all", [1.0]),
        counted(names.IN_VAIN, 0, 10),
        counted(names.SMALLEST_SHARE, 0.9, 400),
        counted(names.JAIN, 0.99, 400),
        counted(f"{names.CUT_OFF} {names.BY_BYTES}", 4, 4),
        counted(f"{names.CUT_OFF} {names.BY_TIME}", 4, 4),
        timed(names.CUT_OFF, names.BY_BYTES, [60.0]),
        timed(names.CUT_OFF, names.BY_TIME, [2100.0]),
        beside(1.01),
        *(left(mode) for mode in (names.AFTER_DEATHS, *names.ROLES)),
        figure(names.LEFT, names.AFTER_ALL, 0, 3),
    ]


def chaos_figures(killed: int = 1000) -> list[Figure]:
    zero = ("never ended", "ended twice", "no reply from a living dispatcher")
    return [
        figure(chaos.REQUESTS, "all", 5000, 5000),
        *(figure(chaos.REQUESTS, what, 0, 5000) for what in zero),
        figure(chaos.ANSWERED, "all", 0.99, 5000),
        figure(chaos.VIOLATIONS, "all", 0, 5000),
        figure(chaos.LEFT, "processes", 0),
        figure(chaos.LEFT, "files", 0),
        figure(chaos.HITS, "worker killed", killed - 9),
        figure(chaos.HITS, "manager killed", 9),
        timed(chaos.RECOVERY, chaos.MANAGER_BACK, [900.0, 1100.0]),
        figure(chaos.SERVED, chaos.AWAY, 990, 1000, "requests"),
        figure(chaos.SERVED, chaos.UNSERVED, 0, 9),
        figure(chaos.SERVED, chaos.ABANDONED, 0, 9),
        growing("RSS, up", False),
        growing(f"heap, dispatcher{ONE_LIFE}", False),
    ]


def kept() -> dict[str, list[Figure]]:
    """Results of all commands, as they should be."""
    goodput = [
        figure(overload.GOODPUT, mode, rate, 900, "1/s", seconds=12.0)
        for mode, rate in (("1x", 100.0), ("3x", 99.5))
    ]
    rejection = replace(figure(overload.REJECTION, "3x", 1.0, 99, "ms"), p99_ms=4.0)
    memory = [figure(overload.MEMORY, "all", 100.0, 1, "MiB", at_s=t) for t in range(8)]
    depths = [
        depth(name, mode, 11.0, 12.0)
        for name in (overload.IN_FLIGHT, overload.QUEUED)
        for mode in ("1.5x", "3x")
    ]
    return {
        BENCH: bench_figures(),
        CHAOS: chaos_figures(),
        KILLS: chaos_figures(),
        SOAK: chaos_figures(),
        OVERLOAD: [*goodput, rejection, *memory, *depths],
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
