"""When a worker's figures are worth a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.tensormq.channel import Usage
from blockflow.tensormq.memory import TensorMemory
from blockflow.wire.control import Stats
from blockflow.worker import monitor
from blockflow.worker.copies import InputCopies
from blockflow.worker.monitor import KpiMonitor, Snapshot
from blockflow.worker.sampling import StageSample
from blockflow.worker.stage import StageMeter

HOST = TensorMemory(None, cast(Any, None), cast(Any, None))
"""A worker on the CPU, and without an arena."""


@pytest.mark.parametrize(
    ("memory", "again"),
    [
        (HOST, False),
        (SimpleNamespace(device="cuda:0"), True),
    ],
)
def test_an_idle_worker_says_so_once_a_second(
    monkeypatch: pytest.MonkeyPatch, memory: Any, again: bool
) -> None:
    """A device's clocks and power change by themselves."""
    now = 5_000_000_000
    monkeypatch.setattr(monitor.time, "monotonic_ns", lambda: now)
    made = KpiMonitor(1, {}, {}, "cpu", memory, int, lambda: None, lambda _: None)
    assert made._worth_telling(Snapshot(StageSample(), {"threads": 1}), None)
    now += 999_000_000
    assert made._worth_telling(Snapshot(StageSample(), {"threads": 1}), None) == again
    assert made._worth_telling(Snapshot(StageSample(), {"threads": 2}), None)
    now += 1_000_000_000
    assert made._worth_telling(Snapshot(StageSample(), {"threads": 2}), None)


class Change:
    """The monitor's condition: each wait for a sample is one step of the test's."""

    def __init__(self, *steps: Callable[[], None]) -> None:
        self.steps = list(steps)
        self.waits: list[float | None] = []
        self.ended: list[bool] = []
        self.notified = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify(self) -> None:
        self.notified += 1

    def wait_for(self, told: Callable[[], object], timeout_s: float) -> None:
        self.ended.append(bool(told()))

    def wait(self, timeout_s: float | None) -> None:
        self.waits.append(timeout_s)
        self.steps.pop(0)()


def test_a_higher_rate_brings_the_next_sample_closer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor.time, "monotonic", lambda: 100.0)
    asked: list[bool] = []
    made = KpiMonitor(1, {}, {}, "cpu", HOST, int, lambda: asked.append(True), lambda _: None)
    change = Change(lambda: made.set_rate(8.0), made.close)
    made._change = cast(Any, change)
    made.set_rate(0.25)
    assert change.notified == 1
    made._run()
    assert change.waits == [4.0, 0.125] and asked == [True]


def test_a_sample_without_an_answer_is_left_out_and_the_next_one_comes_a_period_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Who did not answer is asked again all the same, and who had news.
    now, marks = 100.0, iter([1, 2, 2, 2])
    sent: list[Stats] = []
    answers = [
        Snapshot(StageSample(), {"threads": 1}),
        None,
        Snapshot(StageSample(news=True), {"threads": 1}),
        Snapshot(StageSample(), {"threads": 1}),
    ]

    def ask() -> None:
        nonlocal now
        now += 1.0  # it takes its time
        if (answer := answers.pop(0)) is not None:
            made.answer(answer)

    def pass_time() -> None:
        nonlocal now
        now += 0.25

    monkeypatch.setattr(monitor.time, "monotonic", lambda: now)
    monkeypatch.setattr(monitor.time, "monotonic_ns", lambda: 5_000_000_000)
    made = KpiMonitor(1, {}, {}, "cpu", HOST, marks.__next__, ask, sent.append)
    change = Change(pass_time, pass_time, pass_time, made.close)
    made._change = cast(Any, change)
    made.set_rate(4.0)
    made._run()
    assert [m.extra for m in sent] == [{"threads": 1}] * 2, "nor again what has not changed"
    assert change.waits == [0.25] * 4 and change.ended == [True, False, True, True]
    assert answers == []


@pytest.mark.parametrize("memory", [HOST, SimpleNamespace(device="cuda:0", slots=None)])
def test_the_data_thread_of_an_idle_worker_is_woken_once_a_second(
    monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    now, mark = 5_000_000_000, 1
    monkeypatch.setattr(monitor.time, "monotonic_ns", lambda: now)
    made = KpiMonitor(1, {}, {}, "cpu", memory, lambda: mark, lambda: None, lambda _: None)
    on_device = memory is not HOST
    assert made._worth_asking(USAGE) and made._worth_telling(snapshot(), USAGE)
    for _ in range(3):
        now += 250_000_000
        assert made._worth_asking(USAGE) == on_device
    mark += 1  # somebody asks for something
    assert made._worth_asking(USAGE) and made._worth_asking(USAGE) == on_device
    assert made._worth_asking(replace(USAGE, used=0))  # ... and the result is read
    now += 250_000_000
    assert made._worth_asking(replace(USAGE, used=0)), "a second has passed"


def test_who_is_closed_waits_for_no_answer() -> None:
    made = KpiMonitor(1, {}, {}, "cpu", HOST, int, lambda: None, lambda _: None)
    change = Change()
    made._change = cast(Any, change)
    made.close()
    assert made._answered() is None and change.ended == [True]


USAGE = Usage(
    capacity=800, used=300, high_water=400, committed=500, slots=16, slots_used=7, stalls=3, stale=0
)


def snapshot(requests: int = 0, news: bool = False, threads: int = 1) -> Snapshot:
    stage = StageMeter()
    stage.requests, stage.rows = requests, 2 * requests
    sample = StageSample({1: stage.snapshot(0, 0, 0, 1)}, news, rows=5 * requests)
    return Snapshot(sample, {"threads": threads})


def make(memory: Any = HOST) -> KpiMonitor:
    spec = TensorSpec("float32", ("rows", 2))
    block = StageSpec(1, BlockInfo("b", "1", "0" * 64, "echo", Contract(spec, spec), 0, 0))
    copied = {1: InputCopies(2, 16)}
    return KpiMonitor(7, {1: block}, copied, "cpu", memory, int, lambda: None, lambda _: None)


def test_whatever_has_happened_is_worth_telling(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5_000_000_000
    monkeypatch.setattr(monitor.time, "monotonic_ns", lambda: now)
    made = make()
    assert made._worth_telling(snapshot(), USAGE)
    for _ in range(2):
        assert made._worth_telling(snapshot(news=True), USAGE)
    for told in (
        (snapshot(), replace(USAGE, used=0)),
        (snapshot(threads=2), replace(USAGE, used=0)),
    ):
        assert made._worth_telling(*told)
        assert not made._worth_telling(*told)
    now += 1_000_000_000
    assert made._worth_telling(*told) and not made._worth_telling(*told)


def test_each_figure_has_its_name() -> None:
    times = {1: SimpleNamespace(summary=lambda: {"count": 4.0})}
    memory = SimpleNamespace(
        device=None, device_times=times, extra=lambda: {"host": 1}, figures=dict
    )
    sampled: dict[str, Any] = {}

    def sample(now: int, **figures: Any) -> Any:
        sampled.update(figures)
        return SimpleNamespace(to_dict=dict)

    sampler = cast(Any, SimpleNamespace(sample=sample))
    stats = make(memory)._stats(sampler, snapshot(requests=3), USAGE)
    assert sampled == {
        "rows": 15,
        "arena_bytes": 800,
        "arena_used": 300,
        "arena_committed": 500,
        "slots": 16,
        "slots_used": 7,
    }
    (stage,) = stats.stages
    assert (stage["copies_in"], stage["bytes_copied_in"]) == (2, 16)
    assert stage["device"] == {"count": 4.0}
    assert stats.incarnation == 7
    assert stats.extra == {"threads": 1, "host": 1, "slot_stalls": 3}


class Forgotten(dict[int, Any]):
    """Device times that are forgotten (the worker is ready) just as the monitor looks."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self.clear()
        return found


def test_figures_that_are_forgotten_meanwhile_end_no_monitor() -> None:
    times = Forgotten({1: SimpleNamespace(summary=lambda: {"count": 4.0})})
    memory = SimpleNamespace(device=None, device_times=times, extra=dict, figures=dict)
    process = SimpleNamespace(sample=lambda *_, **__: SimpleNamespace(to_dict=dict))
    (stage,) = make(memory)._stats(cast(Any, process), snapshot(), None).stages
    assert stage["stage"] == 1


@pytest.mark.parametrize(("hz", "period_s"), [(0.0, 0.0), (4.0, 0.25), (1e9, 0.01), (1e-9, 1000.0)])
def test_a_rate_is_kept_within_what_can_be_sampled(hz: float, period_s: float) -> None:
    made = make()
    made.set_rate(hz)
    assert made._period_s == period_s
