"""A process's own figures: which are read at each sample, and which more seldom."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from refusals_rig import no_descriptor

from blockflow.launch import process_kpi
from blockflow.launch.process_kpi import ProcessSampler, private_and_shared, resident

SECOND = 1_000_000_000
MIB = 1 << 20


class FakeProcess:
    rss = 100 * MIB

    def __init__(self) -> None:
        self.cpu_asked = 0

    def oneshot(self) -> AbstractContextManager[None]:
        return nullcontext()

    def cpu_percent(self, interval: float | None) -> float:
        assert interval is None
        self.cpu_asked += 1
        return 0.0 if self.cpu_asked == 1 else 50.0

    def memory_info(self) -> Any:
        return SimpleNamespace(rss=self.rss)

    def num_threads(self) -> int:
        return 3

    def num_fds(self) -> int:
        return 10  # with that of the counting


class Machine:
    """What the sampler asks; counts what is dear."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.walks = self.clocks = 0
        self.mhz: float | None = 2000.0

    def walk(self, pid: int) -> tuple[int, int]:
        assert pid == os.getpid()
        self.walks += 1
        return self.walks, 1000 + self.walks

    def clock(self) -> Any:
        self.clocks += 1
        return None if self.mhz is None else SimpleNamespace(current=self.mhz)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    asked = SimpleNamespace(Process=lambda: made.process, cpu_freq=made.clock)
    monkeypatch.setattr(process_kpi, "psutil", asked)
    monkeypatch.setattr(process_kpi, "private_and_shared", made.walk)
    return made


def test_private_pages_and_shares_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"Rss: 90 kB\nPss: 20 kB\nPss_Anon: 7 kB\nPrivate_Clean: 4 kB\nPrivate_Dirty: 8 kB\n"
    monkeypatch.setattr(process_kpi, "open", lambda *_: io.BytesIO(text), raising=False)
    assert private_and_shared(1) == (12 * 1024, 20 * 1024)


def test_all_figures_are_told(machine: Machine) -> None:
    told = {
        "arena_bytes": 11,
        "arena_used": 12,
        "arena_committed": 17,
        "slots": 13,
        "slots_used": 14,
        "torch_allocated": 15,
        "torch_reserved": 16,
    }
    kpi = ProcessSampler().sample(0, **told).to_dict()  # type: ignore[arg-type]
    assert {name: kpi[name] for name in told} == told
    own = ("pid", "cpu_percent", "cpu_mhz", "rss", "uss", "pss", "threads", "fds")
    assert [kpi[name] for name in own] == [os.getpid(), 50.0, 2000.0, 100 * MIB, 1, 1001, 3, 9]


def test_without_a_clock_there_is_none(machine: Machine) -> None:
    machine.mhz = None
    assert ProcessSampler().sample(0).cpu_mhz == 0.0


@pytest.mark.parametrize("error", [NotImplementedError("no file"), FileNotFoundError(2, "gone")])
def test_a_clock_that_cannot_be_read_costs_no_other_figure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Of a virtual machine without the file, or a core that was taken away just then."""

    def clock() -> Any:
        raise error

    monkeypatch.setattr(process_kpi.psutil, "cpu_freq", clock)
    kpi = ProcessSampler().sample(0)
    assert (kpi.cpu_mhz, kpi.threads) == (0.0, 3)


def test_what_is_dear_is_read_seldom(machine: Machine) -> None:
    sampler = ProcessSampler()
    seen = []
    for quarter in range(4 * 11 + 1):
        if quarter == 4 * 7 + 1:
            machine.process.rss += MIB  # the pages are counted anew: the last time is past
        kpi = sampler.sample(quarter * SECOND // 4)
        seen.append((kpi.uss, machine.clocks))
    assert machine.clocks == 12
    walked = [n for n in range(1, len(seen)) if seen[n][0] != seen[n - 1][0]]
    assert walked == [4 * 5, 4 * 7 + 1]


def test_memory_that_moves_is_followed_each_second(machine: Machine) -> None:
    sampler = ProcessSampler()
    for second in range(4):
        machine.process.rss += MIB
        sampler.sample(second * SECOND)
    assert machine.walks == 4
    machine.process.rss += MIB - 1
    sampler.sample(4 * SECOND)
    assert machine.walks == 4


@pytest.fixture
def spent(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What a walk and a look at the clock cost, in nanoseconds of this thread."""
    cost, used = [0], [0]

    def walk(pid: int) -> tuple[int, int]:
        used[0] += cost[0]
        return Machine.walk(machine, pid)

    def clock() -> Any:
        used[0] += cost[0]
        return Machine.clock(machine)

    monkeypatch.setattr(process_kpi, "private_and_shared", walk)
    monkeypatch.setattr(process_kpi.psutil, "cpu_freq", clock)
    monkeypatch.setattr(process_kpi.time, "thread_time_ns", lambda: used[0])
    return cost


@pytest.mark.parametrize(
    ("cost_ms", "moves", "walks", "clocks"),
    [
        (0, False, 24, 120),
        (2, False, 24, 60),  # 2 ms: each 5 s, 2 s
        (20, False, 3, 6),  # each 40 s, 20 s
        (2, True, 120, 60),
        (20, True, 30, 6),  # each 4 s
        (200, True, 3, 1),  # each 40 s, 200 s
    ],
)
def test_the_dearer_the_more_seldom(
    machine: Machine, spent: list[int], cost_ms: int, moves: bool, walks: int, clocks: int
) -> None:
    spent[0] = cost_ms * 1_000_000
    sampler = ProcessSampler()
    for quarter in range(4 * 120):
        machine.process.rss += MIB * moves
        sampler.sample(quarter * SECOND // 4)
    assert (machine.walks, machine.clocks) == (walks, clocks)


def test_memory_of_another_process() -> None:
    assert resident(os.getpid()) > MIB
    assert resident(0) == 0 == resident(1 << 30)


REFUSALS = [
    OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    OSError(errno.EIO, os.strerror(errno.EIO)),
    psutil.AccessDenied(),
    psutil.NoSuchProcess(1),
]


def refuse(error: Exception) -> Callable[[], Any]:
    def none() -> Any:
        raise error

    return none


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_while_nothing_can_be_looked_at_the_last_figures_stand(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Some of these once ended the thread that samples, and all figures stood still for ever."""
    sampler = ProcessSampler()
    known = sampler.sample(SECOND)
    monkeypatch.setattr(machine.process, "num_fds", refuse(error))
    told = sampler.sample(2 * SECOND, arena_used=5)
    assert (told.rss, told.fds, told.arena_used) == (known.rss, known.fds, 5)


def test_without_a_descriptor_the_clock_is_as_it_was(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = ProcessSampler()
    known = sampler.sample(SECOND)
    assert known.cpu_mhz > 0
    monkeypatch.setattr(process_kpi.psutil, "cpu_freq", no_descriptor)
    assert sampler.sample(3600 * SECOND).cpu_mhz == known.cpu_mhz


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_a_process_that_could_not_be_found_at_first_is_looked_for_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(process_kpi.psutil, "Process", refuse(error))
        sampler = ProcessSampler()
        assert sampler.sample(SECOND).threads == 0
    assert sampler.sample(2 * SECOND).threads == 3


def test_resident_memory_that_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_kpi.psutil, "Process", no_descriptor)
    assert resident(os.getpid()) == 0
