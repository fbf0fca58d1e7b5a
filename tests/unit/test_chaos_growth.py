"""Chaos: what grows in the course of a run, and tables and picture of all that was found."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from chaos_rig import ledger
from rich.console import Console

from blockflow.bench.chaos.faults import Injected
from blockflow.bench.chaos.findings import JUDGED_S, Findings
from blockflow.bench.chaos.grids import fault_grid, growth_grid, outcome_grid
from blockflow.bench.chaos.growth import ONE_LIFE, Tolerance, growth, growths
from blockflow.bench.chaos.kills import REPLICAS
from blockflow.bench.chaos.ledger import OK
from blockflow.bench.chaos.report import (
    TIMELINE,
    draw,
    fault_table,
    figures,
    outcome_table,
)
from blockflow.bench.chaos.run import TOPOLOGY
from blockflow.bench.chaos.watch import PREFIX, MemorySample, Watch
from blockflow.launch.process import shown_name


@cache
def memory(hours: float, per_hour: float, seed: int = 1) -> list[MemorySample]:
    """Two processes, of which the second leaks so many MiB; both die now and then, and load."""
    chance = random.Random(seed)
    out, age = [], {"bf:a": 99, "bf:b": 99}
    for i in range(int(hours * 3600 / 2)):
        rss = {}
        for name in age:
            age[name] = 0 if chance.random() < 0.01 else age[name] + 1
            leaked = per_hour * i / 1800 if name == "bf:b" else 0.0
            settled = 250.0 + chance.gauss(0.0, 4.0) + leaked
            rss[name] = int((90.0 if age[name] < 3 else settled) * 2**20)
        shared = int((2.0 + chance.random()) * 2**20)
        out.append(MemorySample(2.0 * i, sum(rss.values()), shared, 2, 60, rss))
    return out


@cache
def heaps(per_hour: float, seed: int = 1) -> list[MemorySample]:
    """A Dispatcher of 250 MiB, of which 10 are its own and so many leak; now and then its siblings
    die, and for a while all that they shared is its own."""
    chance = random.Random(seed)
    out, alone = [], 0
    for i in range(3600 // 2):
        alone = 60 if chance.random() < 0.003 else alone - 1
        leaked = per_hour * i / 1800
        rss, heap = (base + chance.gauss(0.0, 0.5) + leaked for base in (270.0, 250.0))
        own = heap if alone > 0 else 10.0 + leaked
        mib = [{"bf:dispatcher": int(v * 2**20)} for v in (rss, heap, own)]
        private = mib[2] if i % 10 == 0 else {}
        out.append(MemorySample(2.0 * i, int(rss * 2**20), 2**20, 1, 60, mib[0], mib[1], private))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_that_is_small_beside_shared_pages_is_found(seed: int) -> None:
    """15 MiB an hour are less than a tenth of its resident memory, and more than its own."""
    found = {g.name: g for g in growths(heaps(15.0, seed=seed))}
    assert [name for name, g in found.items() if g.grows] == ["heap, dispatcher"]
    assert found["heap, dispatcher"].tolerance == 4.0
    assert found["RSS, dispatcher"].tolerance > 25.0
    (said,) = Findings(ledger(), memory=heaps(15.0, seed=seed)).violations()
    assert said.startswith("heap, dispatcher grows: +1")


def reborn(samples: list[MemorySample], period_s: float, until_s: float) -> list[MemorySample]:
    """The same process, but until then it ends once in a while, and gives back what it leaked."""
    out, at_birth = [], samples[0]
    for i, s in enumerate(samples):
        if s.at_s < until_s and s.at_s - at_birth.at_s >= period_s:
            at_birth = s
        back = int(LEAK_MIB * at_birth.at_s / 3600 * 2**20)
        parts = [{n: v - back for n, v in m.items()} for m in (s.by_name, s.anonymous, s.private)]
        pids = {"bf:dispatcher": int(at_birth.at_s) + 1, "bf:w": 1 + i // 30}
        out.append(replace(s, by_name=parts[0], anonymous=parts[1], private=parts[2], pids=pids))
    return out


LEAK_MIB = 15.0
"""In an hour."""


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_leak_of_one_that_is_replaced_once_a_minute_shows_in_its_last_life(
    seed: int,
) -> None:
    samples = heaps(LEAK_MIB, seed=seed)
    hidden = growths(reborn(samples, 60.0, 3600.0))
    assert [g.name for g in hidden if g.grows] == []
    assert not any(ONE_LIFE in g.name for g in hidden)
    seen = {g.name: g for g in growths(reborn(samples, 60.0, 1800.0))}
    assert seen[f"heap, dispatcher{ONE_LIFE}"].grows
    assert seen[f"heap, dispatcher{ONE_LIFE}"].per_hour == pytest.approx(LEAK_MIB, abs=2.0)
    assert seen[f"heap, dispatcher{ONE_LIFE}"].seconds == pytest.approx(1440, abs=60)
    sound = {g.name: g for g in growths(reborn(heaps(0.0, seed=seed), 60.0, 1800.0))}
    assert not sound[f"RSS, dispatcher{ONE_LIFE}"].grows


def aged(samples: list[MemorySample], fills_mib: float, inherits_mib: float) -> list[MemorySample]:
    """The Dispatcher ends every minute in the first half; in each life buffers fill within half an
    hour, and each finds what those before it have left in a file."""
    out, birth_s = [], 0.0
    for i, s in enumerate(samples):
        if s.at_s < 1800.0 and s.at_s - birth_s >= 60.0:
            birth_s = s.at_s
        filled = fills_mib * min(1.0, (s.at_s - birth_s) / 300.0) + inherits_mib * birth_s / 1800.0
        parts = [
            {n: v + int(filled * 2**20) for n, v in m.items()}
            for m in (s.by_name, s.anonymous, s.private)
        ]
        pids = {"bf:dispatcher": int(birth_s) + 1, "bf:w": 1 + i // 30}
        out.append(replace(s, by_name=parts[0], anonymous=parts[1], private=parts[2], pids=pids))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_that_old_processes_are_larger_than_young_ones_is_no_leak(seed: int) -> None:
    samples = heaps(0.0, seed=seed)
    assert [g.name for g in growths(aged(samples, 16.0, 0.0)) if g.grows] == []
    left = growths(aged(samples, 16.0, 12.0))
    assert "heap, dispatcher" in [g.name for g in left if g.grows]


@pytest.mark.parametrize("seed", range(5))
def test_pages_that_siblings_leave_behind_are_no_leak(seed: int) -> None:
    assert [g.name for g in growths(heaps(0.0, seed=seed)) if g.grows] == []


def test_a_large_heap_may_breathe_more() -> None:
    grown = [replace(s, private={n: 20 * v for n, v in s.private.items()}) for s in heaps(0.0)]
    found = {g.name: g for g in growths(grown)}
    assert found["heap, dispatcher"].tolerance == pytest.approx(20.0, rel=0.05)


def test_no_process_of_a_run_hides_another_one_by_its_name() -> None:
    """The kernel keeps 15 bytes of a name, by which memory is counted: ``bf:head_parity#`` was all
    three replicas."""
    replicas = [f"{PREFIX}{b}#{n}" for b in TOPOLOGY["blocks"] for n in range(REPLICAS)]
    shown = {shown_name(name) for name in replicas}
    assert len(shown) == len(replicas)
    assert max(map(len, shown)) == 15


def test_a_process_is_seen_with_what_is_its_own() -> None:
    """One that the system would call its own, with 32 MiB that nobody shares."""
    code = (
        "import sys; kept = bytearray(b'x' * (32 << 20)); "
        "open('/proc/self/comm', 'w').write('bf:held'); "
        "print(len(kept), flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        seen = Watch(Path("/nowhere")).sample()
        assert child.stdin is not None
        child.stdin.close()
    for part in (seen.anonymous, seen.private):
        assert 32 << 20 < part["bf:held"] < seen.by_name["bf:held"] < 256 << 20


@pytest.mark.parametrize("seed", range(5))
def test_what_only_breathes_does_not_grow(seed: int) -> None:
    assert [g.name for g in growths(memory(1.0, 0.0, seed)) if g.grows] == []


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_leak_is_found_and_named(seed: int) -> None:
    found = [g for g in growths(memory(1.0, 60.0, seed)) if g.grows]
    assert [g.name for g in found] == ["RSS, b"]
    assert found[0].per_hour == pytest.approx(60.0, abs=10.0)
    leaking = Findings(ledger(), memory=memory(1.0, 60.0, seed))
    (said,) = leaking.violations()
    assert said.startswith("RSS, b grows: +")


def test_leaking_descriptors_and_shared_memory_are_found() -> None:
    leaking = [
        MemorySample(s.at_s, s.rss, s.run_dir + i * 2**16, 2, 60 + i // 20, s.by_name)
        for i, s in enumerate(memory(1.0, 0.0))
    ]
    names = [g.name for g in growths(leaking) if g.grows]
    assert names == ["shared memory", "descriptors per process"]


def test_a_short_run_is_not_judged_by_its_memory() -> None:
    short = memory(0.1, 3000.0)
    assert short[-1].at_s < JUDGED_S
    assert [g.name for g in growths(short) if g.grows] == ["RSS, b"]
    assert not Findings(ledger(), memory=short).violations()
    assert growths(short[:5]) == []


def test_figures_tables_and_picture_of_a_run() -> None:
    ends = [("a", 0.0, 0.1, OK), ("a", 0.5, 0.6, "OVERLOADED"), ("b", 1.1, 1.3, OK)]
    found = Findings(
        ledger(*ends, good=0),
        [Injected(1.0, "worker killed", ("b",), ""), Injected(1.2, "system update", (), "")],
        [MemorySample(t / 2, 100 << 20, 1 << 20, 5, 80) for t in range(8)],
    )
    found.ready_again["worker killed"] = [0.4]
    stored = figures(found)
    made = {(f.name, f.mode): f.value for f in stored if f.name != TIMELINE}
    assert made["requests", "all"] == 3
    assert made["requests", "OVERLOADED"] == 1
    assert made["faults", "worker killed"] == 1
    assert round(made["recovery", "worker killed"]) == 300
    assert made["RSS", "last quarter"] == 100
    assert made["violations", "all"] == 1  # a third of three was refused
    console = Console(record=True, width=100)
    console.print(outcome_table(found), fault_table(found))
    text = console.export_text()
    assert "OVERLOADED" in text
    assert "worker killed" in text
    (step,) = [f for f in stored if f.name == TIMELINE]
    assert (step.value, step.labels["failed"], step.labels["rss"]) == (1.0, 1.0, 100.0)
    assert fault_grid(stored).rows[1][:3] == ("worker killed", "1", "1")
    assert fault_grid(stored).rows[1][3] == "0.30"
    assert ("OVERLOADED", "1", "33.33") in outcome_grid(stored).rows
    assert growth_grid(figures(Findings(ledger(), memory=memory(1.0, 0.0)))).rows
    assert len(draw(stored).axes) == 2


def test_what_may_be_chance_is_no_growth() -> None:
    """Twelve medians, one above the line and one below it in turn."""
    at_s = [n / 10 for n in range(1001)]
    values = [100 + (-1) ** int((at - 20) * 12 / 80) for at in at_s]
    found = growth("x", at_s, values, Tolerance("MiB", 1.0))
    assert found is not None
    residuals = 12 - 36 / 143  # squares, around a line through equidistant points
    half = 2.26 * 12 * (residuals / 10 / 143) ** 0.5
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.01)
    assert not replace(found, value=30.0, low=9.0, high=51.0, tolerance=10.0).grows
    assert replace(found, value=30.0, low=11.0, high=49.0, tolerance=10.0).grows
